"""What a run refuses before its first process, `dovetail check` refuses in the same words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dovetail.cli.main import main
from dovetail.data.files import prompt_row
from dovetail.trainer import preflight
from tests.trainer.toy_run import Toy

pytestmark = pytest.mark.e2e

MODEL, ROWS, REWARD = "actor_rollout_ref.model.path", "data.train_files", "custom_reward_function.path"


def config(**changes: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def norm(size: int) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        kept = tensors.pop("model.norm.weight")[:size].clone()
        tensors |= {"model.norm.weight": kept} if size else {}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


BROKEN_MODELS = {
    "model type `quantum`": config(model_type="quantum"),
    "12 tensors have no place in the network": config(num_hidden_layers=1, layer_types=None),
    "holds no weights for hf_model.model.norm.weight": norm(0),
    "model.norm.weight has shape (7,) on disk and (64,)": norm(7),
    "cannot be read (JSONDecodeError": lambda folder: (folder / "tokenizer.json").write_text("{"),
    "row 1: the prompt is a chat, but the tokenizer has no chat template": no_template,
}
BROKEN_REWARDS = {
    "cannot be called with (data_source, solution_str, ground_truth, extra_info)": "def compute_score(a): ...\n",
    "fails while it is imported in its line 1: ModuleNotFoundError: No module named 'nowhere'. `python ": (
        "import nowhere\ndef compute_score(response): ...\n"
    ),
}


def write_rows(file: Path, *prompts: object) -> Path:
    row = prompt_row(data_source="toy", question="say 1", ground_truth="", ability="toy", extra_info={})
    rows = [row, *({**row, "prompt": prompt} for prompt in prompts), row, row, row]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def refused(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], **changes: object) -> list[str]:
    """What `check` says, after `train` has said the same."""
    arguments = toy.arguments(tmp_path / "run", {MODEL: str(toy.model), **changes})
    capsys.readouterr()
    assert main(["check", "--format", "json", *arguments]) == 2
    found = [problem["message"] for problem in json.loads(capsys.readouterr().out)["problems"]]
    assert main(["train", "--local", *arguments]) == 2
    said = capsys.readouterr().err
    assert all(message in said for message in found)
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
    return found


@pytest.mark.parametrize("words", BROKEN_MODELS)
def test_a_broken_model(words: str, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(toy.model, tmp_path / "model")
    BROKEN_MODELS[words](folder)
    [message] = refused(toy, tmp_path, capsys, **{MODEL: str(folder)})
    assert words in message


def test_prompts_that_are_missing_or_too_long(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", None, [{"role": "user", "content": "x" * 500}])
    [message] = refused(toy, tmp_path, capsys, **{ROWS: str(rows)})
    assert "rows.jsonl row 1: the prompt is None" in message
    assert "rows.jsonl row 2: the prompt has" in message


@pytest.mark.parametrize("words", BROKEN_REWARDS)
def test_a_broken_reward_function(words: str, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(BROKEN_REWARDS[words])
    [message] = refused(toy, tmp_path, capsys, **{REWARD: str(reward)})
    assert words in message


def test_model_rows_and_reward_are_refused_at_once(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(toy.model, tmp_path / "model")
    norm(0)(folder)
    (tmp_path / "reward.py").write_text("def compute_score(a): ...\n")
    rows = write_rows(tmp_path / "rows.jsonl", None)
    inputs = {MODEL: str(folder), ROWS: str(rows), REWARD: str(tmp_path / "reward.py")}
    assert len(refused(toy, tmp_path, capsys, **inputs)) == 3


def test_a_good_run_is_valid_and_of_many_rows_some_are_read(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = toy.arguments(tmp_path / "run", {"data.val_files": str(toy.data / "train.parquet")})
    assert main(["check", *arguments]) == 0
    assert "Looked at: architecture, names and shapes of the weights" in capsys.readouterr().out
    rows = write_rows(tmp_path / "rows.jsonl", *["say 2"] * 4, None)
    monkeypatch.setattr(preflight, "MOST_ROWS", 1)
    assert main(["check", *arguments, f"{ROWS}={rows}", "data.shuffle=False"]) == 0
    assert main(["check", *arguments, f"{ROWS}={rows}", "data.shuffle=False", "data.train_batch_size=6"]) == 2


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("intermediate_size", 97, "mlp.down_proj.weight has shape (64, 96)"),
        ("num_hidden_layers", 3, "cannot build a network of Qwen2Config for a policy: IndexError"),
    ],
)
def test_an_override_that_the_weights_do_not_fit(
    field: str, value: int, words: str, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [message] = refused(toy, tmp_path, capsys, **{f"actor_rollout_ref.model.override_config.{field}": value})
    assert words in message
