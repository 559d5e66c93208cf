"""`dovetail` and `dovetail check` as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dovetail.cli.demo import ADDITION, AGENT, Demo, demo_overrides
from dovetail.cli.main import main
from dovetail.config import installed
from dovetail.trainer import choose, preflight
from tests.config.plan import known_models as known
from tests.trainer.test_simulate import write_run
from tests.trainer.toy_run import Toy

pytestmark = pytest.mark.unit

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture
def launch_list(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(known.QWEN2_5_7B))
    save_file({"model.norm.weight": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    row = {"prompt": "1+1?", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 128)
    path = tmp_path / "launch.txt"
    lines = (
        "# launch lines:",
        f"data.train_files={tmp_path}/train.jsonl",
        "data.train_batch_size=64",
        f"{A}.ppo_mini_batch_size=16",
        f"{A}.ppo_micro_batch_size_per_gpu=2",
        f"{A}.fsdp_config.param_offload=True",
        f"{A}.fsdp_config.optimizer_offload=True",
        f"{R}.n=8",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={tmp_path}",
    )
    path.write_text("\n".join(lines))
    return path


def test_a_valid_configuration_exits_0_and_shows_the_plan(
    launch_list: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--no-files", "--overrides-file", str(launch_list)]) == 0
    out = capsys.readouterr().out
    assert "64 prompts x 8 responses = 512 sequences" in out
    assert "weights sharded over 8" in out
    assert "update actor" in out
    assert out.rstrip().splitlines()[-1].startswith("valid; it fits")


def test_piped_output_is_plain_text_of_100_columns(launch_list: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "check",
            "--no-files",
            "--overrides-file",
            str(launch_list),
            f"{R}.top_p=0.9",
            "reward_model.reward_manager=dapo",
        ]
    )
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.isascii()
    assert all(len(line) <= 100 and line == line.rstrip() for line in out.splitlines())


def test_an_invalid_combination_exits_2_and_names_the_fix(
    launch_list: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{A}.ppo_mini_batch_size=24", "--overrides-file", str(launch_list)]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "ppo_mini_batch_size=24 does not divide data.train_batch_size=64" in out
    assert out.endswith("invalid: 1 error")


def test_an_unknown_key_exits_2_with_the_nearest_key(launch_list: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--overrides-file", str(launch_list), f"{A}.clip_ratio_hgih=0.28"]) == 2
    assert "clip_ratio_high" in capsys.readouterr().out


def test_files_and_overrides_mix_in_any_order(tmp_path: Path, launch_list: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("trainer:\n  nnodes: 2\n")
    arguments = ["data.train_batch_size=128", str(recipe), "--format", "json", f"{R}.n=4"]
    assert main(["check", "--no-files", "--overrides-file", str(launch_list), *arguments]) == 0


def test_json_holds_problems_notices_and_plan(launch_list: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "--no-files", "--overrides-file", str(launch_list), "--format", "json", f"{R}.top_p=0.9"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["valid"] is True
    assert [problem["severity"] for problem in answer["problems"]] == ["warning"]
    assert answer["plan"]["batches"]["sequences"] == 512
    assert answer["plan"]["memory"]["fits"] is True


def test_what_does_not_fit_has_an_exit_code_of_its_own(launch_list: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--no-files", "--overrides-file", str(launch_list), "--device-memory-gib", "16"]) == 3
    assert "does not fit in 16.0 GiB" in capsys.readouterr().out


MISSING = {
    "data.train_files=/no/such.parquet": "there is no file /no/such.parquet",
    "data.val_files=[{here}/train.jsonl,{here}/launch.txt]": "launch.txt ends in '.txt'",
    "data.prompt_key=question": "has no column 'question', only prompt, data_source, reward_model; set data.prompt_key",
    "custom_reward_function.path=/no/reward.py": "there is no file /no/reward.py",
    "custom_reward_function.path={here}/reward.py": "it has no 'compute_score'; it defines later, score. Say "
    "which function scores a response: reward={here}/reward.py:NAME.",
    "data.sampler.class_path=pkg://no_such_package.sampler": "there is no module no_such_package.sampler here",
    "actor_rollout_ref.model.path=/no/such": "/no/such has no config.json",
    "actor_rollout_ref.model.path={here}/run": "is a run folder; export its model with `dovetail export",
    "trainer.import_modules=[no_such_package]": "there is no module no_such_package here",
    "data.train_batch_size=256": "has 128 rows, fewer than one batch of 256",
    f"{R}.name=sglang": "rollout.name=sglang needs the package sglang, which is not installed here: pip",
    f"{A}.strategy=megatron": "strategy=megatron needs the package megatron-core, which is not",
    "actor_rollout_ref.model.lora_rank=8": "model.lora_rank > 0 needs the package peft, which is not installed here",
    "trainer.logger=[console,swanlab]": "trainer.logger=swanlab needs the package swanlab, which is not",
}


_ABSENT = ("sglang", "megatron-core", "peft", "swanlab")


@pytest.mark.parametrize("override", MISSING)
def test_what_is_not_there_is_an_error_unless_the_run_is_for_another_machine(
    override: str, launch_list: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "_version", lambda name: None if name in _ABSENT else "1.0")
    monkeypatch.setattr(installed, "_specifier", lambda name, extra: "")
    monkeypatch.delenv("DOVETAIL_SGLANG_PYTHON", raising=False)
    here = launch_list.parent
    (here / "run" / "global_step_2").mkdir(parents=True)
    (here / "run" / "config.yaml").touch()
    (here / "reward.py").write_text("def score(): ...\ntry:\n    later = 1\nfinally:\n    pass\n")
    arguments = ["check", "--overrides-file", str(launch_list), override.format(here=here)]
    assert main([*arguments, "--format", "json"]) == 2
    found = json.loads(capsys.readouterr().out)["problems"]
    [problem] = [entry["message"] for entry in found if entry["severity"] == "error"]
    assert MISSING[override].format(here=here) in problem
    assert main([*arguments, "--no-files"]) == 0


@pytest.mark.parametrize(
    ("more", "gib"),
    [([], 24.0), (["trainer.nnodes=2"], 80.0), (["--no-files"], 80.0), (["--device-memory-gib", "40"], 40.0)],
)
def test_a_plan_for_this_machine_is_for_the_gpu_it_has(
    more: list[str],
    gib: float,
    launch_list: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choose, "_machine", lambda: choose._Machine(8, 24.0))
    monkeypatch.setattr(preflight, "unusable_inputs", lambda config: [])
    main(["check", "--overrides-file", str(launch_list), "trainer.device=cuda", *more, "--format", "json"])
    assert json.loads(capsys.readouterr().out)["plan"]["memory"]["device_bytes"] == gib * 2**30


def empty(folder: Path) -> None:
    (folder / "train.jsonl").write_text("")


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN = {
    "data.train_files: no rows in {here}/train.jsonl": empty,
    "{here}/train.jsonl:1 is not JSON": lambda folder: (folder / "train.jsonl").write_text('{"prompt"'),
    "{here}/config.json is not valid JSON": lambda folder: (folder / "config.json").write_text("{nope"),
    "{here} holds no safetensors": lambda folder: (folder / "model.safetensors").unlink(),
    "{here}/model.safetensors cannot be read as safetensors": cut_weights,
    "index.json names 1 files that are not there: model-00001-of-00002.safetensors": lose_a_shard,
}


@pytest.mark.parametrize("message", BROKEN)
def test_files_that_a_run_could_not_read_are_errors(
    message: str, launch_list: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BROKEN[message](launch_list.parent)
    arguments = ["check", "--overrides-file", str(launch_list), "--format", "json"]
    assert main(arguments) == 2
    found = json.loads(capsys.readouterr().out)["problems"]
    [problem] = [entry["message"] for entry in found if entry["severity"] == "error"]
    assert message.format(here=launch_list.parent) in problem


def test_a_reward_function_that_is_there_and_a_name_on_the_hub_pass(
    launch_list: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.config.hub._can_be_asked", lambda: False)
    (launch_list.parent / "reward.py").write_text("def compute_score(response):\n    return 0.0\n")
    arguments = ["check", "--overrides-file", str(launch_list), "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"]
    reward = f"custom_reward_function.path={launch_list.parent}/reward.py"
    assert main([*arguments, reward, "data.val_files=hf://datasets/a/b/c.parquet"]) == 0
    out = capsys.readouterr().out
    assert "hf://datasets/a/b/c.parquet" in out
    assert "Qwen/Qwen2.5-0.5B is no folder on this machine, and the Hugging Face hub cannot give" in " ".join(
        out.split()
    )
    assert "Checked:" not in out


def test_without_the_models_config_there_is_no_plan_of_memory(
    launch_list: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--no-files", "actor_rollout_ref.model.path=/no/such"]
    assert main(["check", "--overrides-file", str(launch_list), *arguments]) == 0
    out = capsys.readouterr().out
    assert "no memory part" in " ".join(out.split())
    assert "memory not planned" in out


APART = [
    "async_training.mode=fully_async",
    "async_training.max_staleness=2",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
]


def test_the_plan_of_an_asynchronous_run_says_how_devices_are_split(
    launch_list: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", "--no-files", "--overrides-file", str(launch_list), *APART]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "train, 2 generate (2 engines)" in out
    assert "staleness is at most 2" in out
    assert "--like RUN" in out
    assert main([*arguments, "--like", str(launch_list.parent / "none")]) == 2
    assert "is no run folder" in " ".join(capsys.readouterr().out.split())


def test_steps_of_an_asynchronous_run_are_predicted_from_a_synchronous_one(
    launch_list: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(Toy(tmp_path, tmp_path), tmp_path)
    arguments = ["check", "--no-files", "--format", "json", "--overrides-file", str(launch_list), *APART]
    assert main([*arguments, "--like", str(tmp_path), "--lengths", "50,500"]) == 0
    plan = json.loads(capsys.readouterr().out)["async"]
    assert plan["prediction"]["step_s"] < plan["taking_turns"]["step_s"]
    assert plan["prediction"]["staleness_max"] <= 2
    assert main([*arguments[:2], *arguments[4:], "--like", str(tmp_path)]) == 0
    assert "| taking turns |" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--help"]])
def test_an_unknown_command_suggests_the_nearest(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["chek", *options])
    assert stopped.value.code == 2
    assert "Did you mean check?" in capsys.readouterr().err


def test_a_setting_with_dashes_is_refused_with_the_way_to_write_it(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["check", "--train-batch-size", "8"],
        ["eval", "m", "--reward=my.py:f"],
        ["audit", "r", "--x"],
        ["train", "--config-name=mine"],
        ["train", "--rollout.batch_size", "128"],
        ["train", "--n-samples-per-prompt", "8"],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
    check, _, evaluate, _, audit, _, train, _, named, _, slime, _ = capsys.readouterr().err.splitlines()
    assert check.endswith("--train-batch-size; settings have no dashes: train_batch_size=VALUE")
    assert evaluate.endswith("settings have no dashes: reward=my.py:f")
    assert audit.endswith("unrecognized arguments: --x"), "it takes no settings"
    assert train.endswith("name the YAML file by its path: FOLDER/NAME.yaml")
    assert "settings have no dashes; that is data.train_batch_size (prompts per step" in named
    assert "that is actor_rollout_ref.rollout.n here (docs/guide/from-slime.md" in slime


def test_a_launch_list_that_is_given_as_a_file_is_refused_with_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "launch.txt"
    file.write_text("# of last week\ndata.train_batch_size=64\ntrainer.nnodes=1\n")
    assert main(["train", str(file)]) == 2
    message = capsys.readouterr().err.splitlines()[1]
    assert "is a launch list ('data.train_batch_size=64 trainer.nnodes=' ...), not YAML" in message
    assert message.endswith(f"give it with --overrides-file {file}.")


@pytest.mark.parametrize("demo", [ADDITION, AGENT], ids=["addition", "agent"])
def test_the_demos_launch_list_is_valid_without_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, demo: Demo
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known.SMOLLM2_135M))
    overrides = demo_overrides(demo, tmp_path, tmp_path / "data", tmp_path / "run", steps=12, seed=0)
    assert main(["check", "--no-files", *overrides]) == 0
    out = capsys.readouterr().out
    assert "Warnings" not in out
    assert "134.5 M parameters" in out


@pytest.mark.parametrize(
    "arguments", [["--help"], ["check", "--help"], ["check", "trainer.nnodes=2"], ["check", *APART]]
)
def test_neither_torch_nor_ray_is_imported(arguments: list[str]) -> None:
    code = (
        "import sys; from dovetail.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'transformers', 'tensordict', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
