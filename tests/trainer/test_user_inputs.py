"""What users put in, met by whole runs: bad rows, broken models, a folder in use, steps that do nothing."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.cli.main import main
from dovetail.config import DovetailConfig
from dovetail.data.files import write_rows
from dovetail.models.errors import ModelError
from dovetail.observability.run_folder import read_json_lines
from dovetail.trainer.method import RunOptions, open_method
from dovetail.trainer.model_folders import refuse_broken_models
from dovetail.trainer.shared_folder import with_absolute_folders
from tests.models.tiny import save_tiny_model
from tests.programs import holding
from tests.trainer.toy_run import DAPO, Toy, toy_rows

pytestmark = pytest.mark.e2e


def _train(toy: Toy, run: Path, changes: dict[str, Any]) -> int:
    return main(["train", "--local", *toy.arguments(run, changes)])


def test_bad_rows_stop_a_run_before_it_begins_and_a_resume_goes_on_without_them(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = toy_rows(24)
    files = {"data.train_files": str(write_rows(rows, tmp_path / "rows.jsonl")), "trainer.save_freq": 1}
    run = tmp_path / "run"
    assert _train(toy, run, {**files, "trainer.total_training_steps": 2}) == 0
    capsys.readouterr()
    read = {row["prompt"] for step in (1, 2) for row in read_json_lines(run / "rollouts" / f"step_{step}.jsonl")}
    unread = [number for number in range(24) if not any(f"say {number}" in prompt.split("\n") or
              prompt.rstrip().endswith(f"say {number}") for prompt in read)]  # fmt: skip
    assert len(read) == 8
    rows[unread[0]]["prompt"] = None
    rows[unread[1]]["prompt"] = [{"role": "user", "content": "x" * 500}]
    write_rows(rows, tmp_path / "rows.jsonl")
    assert _train(toy, run, {**files, "trainer.total_training_steps": 4}) == 2
    shown = capsys.readouterr().err
    assert f"rows.jsonl row {unread[0]}: the prompt is None" in shown
    assert f"rows.jsonl row {unread[1]}: the prompt has" in shown
    assert "set data.skip_bad_rows=True" in shown
    assert "Traceback" not in shown
    assert len(list(read_json_lines(run / "metrics.jsonl"))) == 2
    goes_on = {**files, "trainer.total_training_steps": 4, "data.skip_bad_rows": True}
    assert _train(toy, run, goes_on) == 0
    assert [line["step"] for line in read_json_lines(run / "metrics.jsonl")] == [1, 2, 3, 4]
    later = {row["prompt"] for step in (3, 4) for row in read_json_lines(run / "rollouts" / f"step_{step}.jsonl")}
    assert len(later) == 8
    assert not later & read


def test_a_data_column_called_uid_does_not_clash(toy: Toy, tmp_path: Path) -> None:
    rows = [{**row, "uid": "mine", "index": 7} for row in toy_rows(8)]
    files = {"data.train_files": str(write_rows(rows, tmp_path / "rows.jsonl")), "trainer.total_training_steps": 1}
    assert _train(toy, tmp_path / "run", files) == 0


@pytest.mark.parametrize("what", ["nan", "missing", "layers"])
def test_a_broken_model_is_one_line_and_no_traceback(
    what: str, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(toy.model, folder)
    tensors = load_file(folder / "model.safetensors")
    if what == "nan":
        tensors["model.norm.weight"][0] = torch.nan
    elif what == "missing":
        del tensors["model.norm.weight"]
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "layer_types": None}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert _train(toy, tmp_path / "run", {"actor_rollout_ref.model.path": str(folder)}) == 2
    shown = capsys.readouterr().err
    said = {"nan": "1 of the 64 numbers of model.norm.weight", "missing": "no weights for hf_model.model.norm.weight",
            "layers": "tensors have no place in the network"}  # fmt: skip
    [line] = [line for line in shown.splitlines() if str(folder) in line]
    assert said[what] in line
    assert "Traceback" not in shown


def test_a_model_that_cannot_be_packed_is_refused_before_a_process_starts(toy: Toy, tmp_path: Path) -> None:
    keys = {"actor_rollout_ref.model.path": str(save_tiny_model("falcon_h1", tmp_path))}
    with pytest.raises(ModelError, match="set use_remove_padding=False"):
        refuse_broken_models(toy.config(tmp_path, keys))
    keys["actor_rollout_ref.model.use_remove_padding"] = False
    with pytest.raises(ModelError, match=r"falcon_h1 has hybrid layers; the native engine .* rollout.name=vllm"):
        refuse_broken_models(toy.config(tmp_path, keys))
    refuse_broken_models(toy.config(tmp_path, keys), generates=False)
    tunes = {**keys, "trainer.method": "sft", "sft.val_samples": 2, "data.val_files": "val.jsonl"}
    with pytest.raises(ModelError, match=r"falcon_h1 has hybrid layers.*Or set sft\.val_samples=0"):
        refuse_broken_models(toy.config(tmp_path, tunes))
    refuse_broken_models(toy.config(tmp_path, {**tunes, "sft.val_samples": 0}))
    refuse_broken_models(toy.config(tmp_path, {**keys, "actor_rollout_ref.rollout.name": "vllm"}))


def test_a_model_that_megatron_does_not_build_is_refused_before_a_process_starts(toy: Toy, tmp_path: Path) -> None:
    path = str(save_tiny_model("mixtral", tmp_path))
    keys = {"actor_rollout_ref.model.path": path, "actor_rollout_ref.actor.strategy": "megatron"}
    with pytest.raises(ModelError, match=r"model_type=mixtral is not built on Megatron here.*strategy=fsdp2"):
        refuse_broken_models(toy.config(tmp_path, keys))


def test_a_network_whose_module_only_workers_import_is_not_looked_at_before(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    keys = {"reward_model.enable": True, "reward_model.model.path": str(tmp_path)}
    with pytest.raises(ModelError, match="mine"):
        refuse_broken_models(toy.config(tmp_path, keys))
    refuse_broken_models(toy.config(tmp_path, {**keys, "reward_model.model.external_lib": "my_models"}))


def test_threads_that_read_prompts_ahead_end_with_the_run(toy: Toy, tmp_path: Path) -> None:
    before = set(threading.enumerate())

    def readers() -> list[str]:
        return [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("prompts")]

    config = toy.config(tmp_path, {"data.dataloader_num_workers": 2})
    with ExitStack() as open_things:
        method = open_method(config, RunOptions(use_ray=False), open_things)
        method._train_loader.next_batch()
        assert readers()
    assert not readers()


def test_a_second_run_in_a_folder_is_refused_and_leaves_every_file_as_it_was(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("of: the first\n")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    with holding(run):
        before = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in run.iterdir()}
        assert _train(toy, run, {}) == 2
        assert "in use by another run" in capsys.readouterr().err
        assert {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in run.iterdir()} == before
    assert _train(toy, run, {"trainer.total_training_steps": 1}) == 0
    assert (run / "previous_1" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (run / "previous_1" / "config.yaml").read_text() == "of: the first\n"
    assert not (run / "run.lock").exists()


def test_a_run_that_diverges_says_so_in_one_line(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(toy, tmp_path / "run", {"actor_rollout_ref.actor.optim.lr": 1e14}) == 2
    shown = capsys.readouterr().err
    assert "the model's logits are not finite" in shown
    assert "Traceback" not in shown


def test_a_run_whose_steps_are_all_skipped_stops(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scores so large that the gradient's norm is infinite."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1e38 * (len(solution_str) % 2)\n"
    )
    changes = {"custom_reward_function.path": str(reward), "algorithm.adv_estimator": "rloo"}
    changes |= {"trainer.total_training_steps": 50}
    assert _train(toy, tmp_path / "run", changes) == 2
    shown = capsys.readouterr().err
    assert "every optimizer step of the actor was skipped in the last 3 steps" in shown
    assert "Traceback" not in shown
    assert len(list(read_json_lines(tmp_path / "run" / "metrics.jsonl"))) < 10


def test_dynamic_sampling_without_a_limit_ends_on_solved_data(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.trainer.dapo.EMPTY_ROUNDS", 3)
    reward = tmp_path / "reward.py"
    reward.write_text("def mostly(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n")
    changes = {**DAPO, "algorithm.filter_groups.max_num_gen_batches": 0, "algorithm.filter_groups.metric": "score"}
    assert _train(toy, tmp_path / "run", {**changes, "custom_reward_function.path": str(reward)}) == 2
    shown = capsys.readouterr().err
    assert "step 1: 3 generation rounds in a row (36 groups) had no group whose answers differ in score" in shown
    assert "Traceback" not in shown


@pytest.mark.unit
def test_a_relative_path_of_a_model_means_the_drivers_folder_on_every_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("models/policy", "tokenizer", "judge"):
        (tmp_path / name).mkdir(parents=True)
    config = DovetailConfig(
        actor_rollout_ref={"model": {"path": "models/policy", "tokenizer_path": "tokenizer"}},
        critic={"model": {"path": "org/name"}},
        reward_model={"enable": True, "model": {"path": "judge"}},
    )
    sent = with_absolute_folders(config)
    assert sent.actor_rollout_ref.model.path == str(tmp_path / "models" / "policy")
    assert sent.actor_rollout_ref.model.tokenizer_path == str(tmp_path / "tokenizer")
    assert sent.reward_model.model.path == str(tmp_path / "judge")
    assert sent.critic.model.path == "org/name", "no folder of this machine: a name on the hub"
