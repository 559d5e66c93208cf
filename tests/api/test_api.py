"""`dovetail.GRPO(...).train()` and its kin: whole runs in this process, on a tiny model, and one on Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dovetail
from dovetail.config import ConfigError
from dovetail.data.errors import DataError
from tests.api.scores import ascii_share
from tests.ray_workers import quick_workers
from tests.trainer.toy_run import save_toy_model

pytestmark = pytest.mark.e2e

ROWS = [{"prompt": f"say {n}", "answer": "abc"[n % 3]} for n in range(16)]
SMALL = {
    "data.max_response_length": 8,
    "actor_rollout_ref.rollout.n": 4,
    "reward_model.num_workers": 1,
    "trainer.logger": ["file"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_toy_model(tmp_path_factory.mktemp("api") / "model"))


def test_the_package_is_light_until_a_name_is_used() -> None:
    program = (
        "import dovetail, sys; print(dir(dovetail), [m for m in ('torch', 'ray', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip().endswith("[]")
    assert "GRPO" in done.stdout
    with pytest.raises(AttributeError, match="from Python there are DAPO, DPO, GRPO"):
        dovetail.Grpo  # noqa: B018


def test_a_run_of_rows_and_a_function_learns_and_leaves_everything_behind(model: str, tmp_path: Path) -> None:
    """A local function, which no process can import: nothing in its module has it by name."""
    limit = 128

    def score(response: str) -> float:
        return sum(ord(letter) < limit for letter in response) / max(1, len(response))

    seen: list[int] = []
    run = dovetail.GRPO(
        model,
        ROWS,
        reward=score,
        val_data=ROWS[:2],
        output=tmp_path / "run",
        steps=12,
        lr=3e-3,
        config={**SMALL, "data": {"train_batch_size": 4}},
        on_step=lambda step, metrics: seen.append(step),
        **{"actor_rollout_ref.rollout.n": 8},
    ).train()
    assert seen == list(range(1, 13))
    assert run.steps == 12
    scores = [row["critic/score/mean"] for row in run.metrics if row["step"] > 0]
    assert sum(scores[-3:]) > sum(scores[:3]) + 0.15
    assert len(run.samples) == 32
    assert all("response" in sample and "score" in sample for sample in run.samples)
    assert run.samples_of(1) != run.samples
    assert any(name.startswith("val") for name in run.validation)
    assert run.checkpoint is not None
    assert run.checkpoint.name == "global_step_12"
    assert len(run.generate(["say 1", "say 2"], n=2, temperature=1.0, max_tokens=4)) == 4
    assert len(run.generate([{"role": "user", "content": "say 1"}], max_tokens=4)) == 1
    assert run.generate([]) == []
    with pytest.raises(DataError, match="prompts is one message"):
        run.generate({"role": "user", "content": "say 1"})  # pyrefly: ignore[bad-argument-type]
    exported = run.export(tmp_path / "exported")
    assert (exported / "model.safetensors").exists()
    with pytest.raises(FileExistsError):
        run.export(exported)
    again = dovetail.Run(tmp_path / "run")
    assert again.metrics == run.metrics
    # What was given as objects is in the folder: the shell continues the run without this process.
    assert {"reward.pkl", "data", "config.yaml"} <= {file.name for file in run.folder.iterdir()}


@pytest.mark.parametrize("word", ["stop", True, np.True_], ids=["stop", "True", "numpy's True"])
def test_a_callback_stops_the_run_with_a_checkpoint_and_train_continues_it(
    model: str, tmp_path: Path, word: Any
) -> None:
    def stop(step: int, metrics: dict[str, float]) -> Any:
        assert metrics["critic/score/mean"] >= 0
        return word if step == 1 else False

    def trainer(on_step: Any) -> dovetail.RLOO:
        return dovetail.RLOO(
            model, ROWS, ascii_share, output=tmp_path / "run", steps=2, on_step=on_step, config=SMALL, ray=False
        )

    stopped = trainer(stop).train()
    assert stopped.steps == 1
    assert stopped.checkpoint is not None
    assert stopped.checkpoint.name == "global_step_1"
    run = trainer(None).train()
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert "reward/has/mean" in run.metrics[-1]


def test_what_a_callback_returns_without_effect_is_said_once(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = dovetail.RLOO(
        model, ROWS, ascii_share, output=tmp_path, steps=2, on_step=lambda *_: "Stop", config=SMALL, ray=False
    ).train()
    assert run.steps == 2
    assert caplog.text.count("on_step returned 'Stop', which has no effect: \"stop\" or True ends the run.") == 1


def test_ppo_and_dapo_are_presets_of_the_same_configuration(model: str, tmp_path: Path) -> None:
    ppo = dovetail.PPO(model, ROWS, ascii_share, output=tmp_path / "ppo", config=SMALL).config
    assert ppo.uses_critic
    dapo = dovetail.DAPO(model, ROWS, ascii_share, output=tmp_path / "dapo", config=SMALL)
    assert dapo.config.algorithm.filter_groups.enable
    assert dapo.check()
    own = dovetail.DAPO(model, ROWS, output=tmp_path / "own", **{"actor_rollout_ref.actor.clip_ratio_high": 0.4}).config
    assert own.actor_rollout_ref.actor.clip_high == 0.4
    assert own.custom_reward_function.path is None


def test_functions_are_found_by_module_and_others_are_pickled(model: str, tmp_path: Path) -> None:
    config = dovetail.GRPO(model, ROWS, ascii_share, output=tmp_path / "a").config
    assert config.custom_reward_function.path == "pkg://tests.api.scores"
    config = dovetail.GRPO(model, ROWS, lambda response: 1.0, output=tmp_path / "b").config
    assert config.custom_reward_function.path == str(tmp_path / "b" / "reward.pkl")
    config = dovetail.GRPO(model, ROWS, [ascii_share, "gsm8k"], output=tmp_path / "c").config
    listed = config.reward_model.reward_kwargs["rewards"]
    assert [entry["name"] for entry in listed] == ["ascii_share", "score_by_rule"]
    config = dovetail.GRPO(model, ROWS, lambda completions, **columns: [], output=tmp_path / "d").config
    assert config.reward_model.reward_manager == "batch"


class Table:
    """As much of `datasets.Dataset` as is used: iterates over rows, whose dicts have the keys of all rows."""

    features = ("prompt", "answer")

    def __init__(self, rows: Any = ROWS) -> None:
        self._rows = rows

    def __iter__(self) -> Any:
        return iter(self._rows)


def test_messages_of_a_data_set_lose_the_keys_of_other_rows_and_other_columns_keep_them(
    model: str, tmp_path: Path
) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo", "terms": None}}}
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "extra_info": {"level": None}}
    config = dovetail.SFT(model, Table([row]), output=tmp_path, steps=1).config
    written = json.loads(Path(config.data.train_paths[0]).read_text())
    assert written["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert written["extra_info"] == {"level": None}


class Frame(Table):
    """As much of `pandas.DataFrame` as is used; cells as `read_parquet` gives them."""

    iterrows = None

    def to_dict(self, orient: str) -> Any:
        assert orient == "records"
        return self._rows


def test_cells_of_a_frame_may_be_arrays_or_missing(model: str, tmp_path: Path) -> None:
    call = {"function": {"name": "look", "arguments": {"at": np.array(["sky"]), "on": None}}}
    message = {"role": "assistant", "content": "It rains.", "tool_calls": np.array([call], dtype=object)}
    row = {"messages": np.array([message], dtype=object), "weight": np.float32(0.5), "note": float("nan")}
    row["extra_info"] = {"index": np.int64(3), "level": None}
    config = dovetail.SFT(model, Frame([row]), output=tmp_path, steps=1).config
    written = json.loads(Path(config.data.train_paths[0]).read_text())
    call = {"function": {"name": "look", "arguments": {"at": ["sky"]}}}
    message = {"role": "assistant", "content": "It rains.", "tool_calls": [call]}
    info = {"index": 3, "level": None}
    assert written == {"messages": [message], "weight": 0.5, "note": None, "extra_info": info}


@pytest.mark.parametrize("data", [ROWS, tuple(ROWS), Table()], ids=["list", "tuple", "dataset"])
def test_rows_of_any_kind_are_written_to_the_run_folder(model: str, tmp_path: Path, data: Any) -> None:
    config = dovetail.GRPO(model, data, ascii_share, output=tmp_path).config
    assert config.data.train_paths == (str(tmp_path / "data" / "data.jsonl"),)
    assert len((tmp_path / "data" / "data.jsonl").read_text().splitlines()) == len(ROWS)


@pytest.mark.parametrize(
    ("data", "reward", "message"),
    [
        ([], ascii_share, "data: it is empty"),
        ([1, 2], ascii_share, "data: it holds a int, '1'"),
        (
            ["What is 1+1?", "2" * 300],
            ascii_share,
            r"data: it holds the text 'What is 1\+1\?', .* rows such as \[{'prompt",
        ),
        ([__file__, "2" * 300], ascii_share, "data: it holds the text '222"),
        ({"prompt": ["a"]}, ascii_share, "data: it is a dict; give a path"),
        (5, ascii_share, "data: it is a int; give a path"),
        (ROWS, 5, "reward: it is a int; give a function"),
        (ROWS, [ascii_share, 5], "reward: it holds a int; give functions"),
        ([{"prompt": b"bytes"}], ascii_share, "what JSON cannot"),
        (ROWS, lambda response, lock=sys.stdout: 0.0, "cannot be sent to the scoring processes"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_way_out(
    model: str, tmp_path: Path, data: Any, reward: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dovetail.GRPO(model, data, reward, output=tmp_path).config  # noqa: B018


def test_a_list_of_paths_may_name_what_a_users_class_or_the_hub_has_and_files_that_are_missing(
    model: str, tmp_path: Path
) -> None:
    """A missing file is named when the run starts, with where it was looked for."""
    paths = ("hf://datasets/org/name", str(tmp_path), "missing.jsonl")
    assert dovetail.GRPO(model, paths, ascii_share, output=tmp_path).config.data.train_paths == paths
    own = {"data": {"custom_cls": {"path": "mine.py", "name": "Mine"}}}
    assert dovetail.GRPO(
        model, ["maze", "sudoku"], ascii_share, output=tmp_path, config=own
    ).config.data.train_paths == (
        "maze",
        "sudoku",
    )


def test_trainers_made_in_the_same_second_have_folders_of_their_own(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sweep in one line: the second continued the first one's run, which had nothing left to train."""
    monkeypatch.chdir(tmp_path)
    trainers = [dovetail.SFT(model, "rows.jsonl", lr=lr) for lr in (1e-4, 1e-5, 1e-6)]
    folders = {trainer.config.trainer.run_dir for trainer in trainers}
    assert len(folders) == 3
    assert {trainer.config.trainer.run_dir for trainer in trainers} == folders


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": object()}, "model is a object; it must be a folder .*save_pretrained.*, or a name on the hub"),
        ({"output": 3}, "output is a int; it must be the path"),
        ({"ray": "no"}, "ray is a str; it must be True or False"),
    ],
)
def test_an_argument_of_another_type_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dovetail.SFT(**{"model": "model", "data": ROWS} | arguments)
    with pytest.raises(ConfigError, match="teacher is a object; it must be a folder"):
        dovetail.Distill("model", ROWS, object())  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("keys", [{"actor_rollout_ref.actor.optim.lr": 1e-4}, {"lr": 1e-4}])
def test_an_argument_and_a_key_that_say_different_things_are_refused(
    model: str, tmp_path: Path, keys: dict[str, Any]
) -> None:
    """A sweep over `lr=` with one `config` for all: every run silently trained with the rate in `config`."""
    with pytest.raises(ConfigError, match=r"lr=0.001 and \S*lr=0.0001 set the same key; leave one of them out"):
        dovetail.SFT(model, ROWS, lr=1e-3, output=tmp_path, config=keys).config  # noqa: B018
    config = dovetail.SFT(model, ROWS, lr=1e-4, output=tmp_path, config=keys).config
    assert config.actor_rollout_ref.actor.optim.lr == 1e-4


def test_the_arguments_of_trl_are_refused_with_their_names_here() -> None:
    with pytest.raises(ConfigError) as refused:
        dovetail.GRPO(model="org/name", train_dataset=[], reward_funcs=len, loss_type="dapo")
    for words in ("train_dataset is not a known key; that is data here", "reward_funcs is not", "actor.loss_agg_mode"):
        assert words in str(refused.value)
    with pytest.raises(ConfigError, match="data is not set; give a path or rows"):
        dovetail.SFT("org/name")


def test_an_output_that_is_a_file_is_refused(model: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"output=.*taken cannot be written: it is a file, not a folder"):
        dovetail.GRPO(model, [{"prompt": "a"}], reward="exact", output=tmp_path / "taken").train()


def test_a_callback_that_is_no_function_and_keys_that_are_no_dict_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="on_step is a int; it must be a function of"):
        dovetail.GRPO(model, ROWS, ascii_share, on_step=5)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ConfigError, match="config is a list; it must be a dict of keys"):
        dovetail.SFT(model, ROWS, config=["lr"])  # pyrefly: ignore[bad-argument-type]


def test_a_callback_of_other_arguments_is_refused_before_the_first_step(model: str, tmp_path: Path) -> None:
    def watch(metrics: dict[str, float]) -> None: ...

    trainer = dovetail.GRPO(model, ROWS, ascii_share, output=tmp_path, on_step=watch)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(
        ConfigError, match=r"on_step: watch cannot be called with \(step, metrics\): too many positional"
    ):
        trainer.train()
    assert not (tmp_path / "config.yaml").exists()


def test_other_rows_do_not_replace_those_that_a_run_in_the_folder_has(model: str, tmp_path: Path) -> None:
    paths = [
        dovetail.GRPO(model, rows, ascii_share, output=tmp_path).config.data.train_paths
        for rows in (ROWS, ROWS[:8], ROWS, ROWS[:8])
    ]
    names = ["data.jsonl", "data_2.jsonl", "data.jsonl", "data_2.jsonl"]
    assert paths == [(str(tmp_path / "data" / name),) for name in names]
    assert sorted(file.name for file in (tmp_path / "data").iterdir()) == names[:2]
    assert len((tmp_path / "data" / "data.jsonl").read_text().splitlines()) == len(ROWS)


def test_the_same_lines_run_on_ray(model: str, tmp_path: Path) -> None:
    """Two workers on Ray, and a function that only this process has."""
    prefix = "say"
    run = dovetail.GRPO(
        model,
        ROWS,
        reward=lambda prompt, response: float(prompt.startswith(prefix)),
        output=tmp_path / "run",
        steps=1,
        config={**SMALL, "trainer.n_gpus_per_node": 2, "ray_init.runtime_env": quick_workers()},
    ).train()
    assert run.metrics[-1]["critic/score/mean"] == 1.0


def test_a_run_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone is no folder"):
        dovetail.Run(tmp_path / "gone")


def test_fine_tuning_from_python_learns_and_its_export_goes_on(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {n}", "response": "abab"} for n in range(16)]
    config = {"data.train_batch_size": 8, "trainer.logger": ["file"]}
    run = dovetail.SFT(model, rows, output=tmp_path / "sft", steps=6, lr=1e-2, config=config).train()
    losses = [row["train/loss"] for row in run.metrics]
    assert losses[-1] < losses[0] - 0.3
    tuned = run.export(tmp_path / "tuned")
    pairs = [{"prompt": row["prompt"], "chosen": "abab", "rejected": "xyxy"} for row in rows]
    preferred = dovetail.DPO(tuned, pairs, output=tmp_path / "dpo", steps=2, config=config)
    assert preferred.config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert preferred.train().metrics[-1]["train/rewards/accuracies"] > 0.5
    scorer = dovetail.RewardModel(tuned, pairs, output=tmp_path / "reward", steps=2, lr=1e-3, config=config)
    assert scorer.config.critic.optim.lr == 1e-3
    assert scorer.train().steps == 2


def test_distillation_from_python_names_its_teacher(model: str, tmp_path: Path) -> None:
    trainer = dovetail.Distill(model, [{"prompt": "say 1"}] * 8, teacher=model, output=tmp_path / "run")
    assert (trainer.config.trainer.method, trainer.config.distill.teacher.path) == ("distill", model)
    several = dovetail.Distill(
        model, [{"prompt": "say 1"}] * 8, {"math": model, "geo.3k": model}, output=tmp_path / "2"
    )
    assert several.config.distill.teachers == {"math": model, "geo.3k": model}
