"""What a run refuses before its first process, `dovetail check` refuses in the same words."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dovetail.cli.main import main
from dovetail.data.files import prompt_row
from dovetail.observability.console import StepConsole
from dovetail.trainer import choose, preflight
from dovetail.trainer.run import run_training
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
    "row 1: the prompt is a chat, but the tokenizer has no chat template": no_template,
}
BROKEN_REWARDS = {
    "cannot be called with (data_source, solution_str, ground_truth, extra_info)": "def compute_score(a): ...\n",
    "asks for anwser; the row has ability, index, prompt.": "def compute_score(response, anwser): ...\n",
    "fails while it is imported in its line 1: ModuleNotFoundError: No module named 'nowhere'. `python ": (
        "import nowhere\ndef compute_score(response): ...\n"
    ),
}

TOOL = 'from dovetail.agents import tool\n@tool\ndef add(a: int) -> int:\n    """Adds."""\n    return a\n'
BROKEN_TOOLS = {
    "has no function marked with @tool": "def add(a): ...\n",
    "fails while it is imported in its line 1: ModuleNotFoundError": "import nowhere\n",
    "multi_turn.format=hermse is not known. Did you mean hermes?": TOOL,
}

BROKEN_ENVIRONMENTS = {
    "its __init__ needs some: missing a required argument: 'size'": (
        '    def __init__(self, size): ...\n    def move(self, to: str) -> str:\n        """Move."""\n'
    ),
    "The tool move has no docstring": "    def move(self, to: str) -> str: ...\n",
    "Game has no tools": "    def reset(self): ...\n",
}


def write_rows(file: Path, *prompts: object, data_source: str = "toy") -> Path:
    row = prompt_row(data_source=data_source, question="say 1", ground_truth="", ability="toy", extra_info={})
    rows = [row, *({**row, "prompt": prompt} for prompt in prompts), row, row, row]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


Refused = Callable[[dict[str, object]], list[str]]


@pytest.fixture
def refused(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """What `check` says, after `train` has said the same."""

    def said_by_both(changes: dict[str, object]) -> list[str]:
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

    return said_by_both


@pytest.fixture
def model(toy: Toy, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return shutil.copytree(toy.model, tmp_path / "model")


@pytest.mark.parametrize("words", BROKEN_MODELS)
def test_a_broken_model(words: str, refused: Refused, model: Path) -> None:
    BROKEN_MODELS[words](model)
    [message] = refused({MODEL: str(model)})
    assert words in message


def test_a_model_whose_experts_cannot_be_replayed(refused: Refused) -> None:
    [message] = refused({"actor_rollout_ref.actor.router_replay.mode": "R2"})
    assert "Qwen2ForCausalLM has no experts: router replay knows the routers of Mixtral" in message


def test_prompts_that_are_missing_or_too_long(tmp_path: Path, refused: Refused) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", None, [{"role": "user", "content": "x" * 500}])
    [message] = refused({ROWS: str(rows)})
    assert "rows.jsonl row 1: the prompt is None" in message
    assert "rows.jsonl row 2: the prompt has" in message


@pytest.mark.parametrize("words", BROKEN_REWARDS)
def test_a_broken_reward_function(words: str, tmp_path: Path, refused: Refused) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(BROKEN_REWARDS[words])
    [message] = refused({REWARD: str(reward)})
    assert words in message


def test_a_column_that_only_training_rows_have(tmp_path: Path, refused: Refused) -> None:
    validation = write_rows(tmp_path / "validation.jsonl")
    rows = [json.loads(line) | {"answer": "1"} for line in validation.read_text().splitlines()]
    training = tmp_path / "rows.jsonl"
    training.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def compute_score(response, answer): ...\n")
    keys = {ROWS: str(training), "data.val_files": str(validation), REWARD: str(tmp_path / "reward.py")}
    [message] = refused(keys)
    assert "asks for answer; the row has ability, prompt. All data files need it, validation's too." in message


@pytest.mark.parametrize("words", BROKEN_TOOLS)
def test_broken_tools_of_an_agent(words: str, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "tools.py").write_text(BROKEN_TOOLS[words])
    turns = "actor_rollout_ref.rollout.multi_turn"
    keys = {f"{turns}.enable": True, f"{turns}.function_tool_path": str(tmp_path / "tools.py")}
    [message] = refused(keys | ({f"{turns}.format": "hermse"} if "hermse" in words else {}))
    assert words in message


@pytest.mark.parametrize("words", BROKEN_ENVIRONMENTS)
def test_a_broken_environment_of_an_agent(words: str, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "games.py").write_text(f"class Game:\n{BROKEN_ENVIRONMENTS[words]}")
    [message] = refused({"actor_rollout_ref.rollout.agent.environment": f"{tmp_path}/games.py:Game"})
    assert words in message


def test_the_folder_of_a_run_is_no_checkpoint_to_resume_from(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "earlier" / "global_step_3").mkdir(parents=True)
    keys = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(tmp_path / "earlier")}
    [message] = refused(keys)
    assert f"is the folder of a run; give one of its checkpoints, such as {tmp_path}/earlier/global_step_3." in message
    (tmp_path / "earlier" / "global_step_3").rmdir()
    [message] = refused(keys)
    assert "has no manifest.json, so it is no complete checkpoint" in message


def test_model_rows_and_reward_are_refused_at_once(tmp_path: Path, refused: Refused, model: Path) -> None:
    norm(0)(model)
    (tmp_path / "reward.py").write_text("def compute_score(a): ...\n")
    rows = write_rows(tmp_path / "rows.jsonl", None)
    inputs = {MODEL: str(model), ROWS: str(rows), REWARD: str(tmp_path / "reward.py")}
    assert len(refused(inputs)) == 3


def test_a_good_run_is_valid_and_of_many_rows_some_are_read(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = toy.arguments(tmp_path / "run", {"data.val_files": str(toy.data / "train.parquet")})
    assert main(["check", *arguments]) == 0
    assert "Checked: architecture and weights" in capsys.readouterr().out
    rows = write_rows(tmp_path / "rows.jsonl", *["say 2"] * 4, None)
    monkeypatch.setattr(preflight, "MOST_ROWS", 1)
    assert main(["check", *arguments, f"{ROWS}={rows}", "data.shuffle=False"]) == 0
    assert main(["check", *arguments, f"{ROWS}={rows}", "data.shuffle=False", "data.train_batch_size=6"]) == 2


def test_the_plan_of_a_run_is_for_the_memory_of_this_machines_gpu_as_that_of_check(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_machine", lambda: choose._Machine(1, 24.0))
    changes = {"trainer.device": "auto"}
    main(["check", "--format", "json", *toy.arguments(tmp_path, changes)])
    plan = json.loads(capsys.readouterr().out)["plan"]
    with pytest.raises(InterruptedError):
        run_training(toy.config(tmp_path, changes), use_ray=False, console=_interrupt)
    assert json.loads((tmp_path / "plan.json").read_text()) == plan
    assert plan["memory"]["device_bytes"] == 24.0 * 2**30


def _interrupt(*_: object) -> StepConsole:
    raise InterruptedError


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("intermediate_size", 97, "mlp.down_proj.weight has shape (64, 96)"),
        ("num_hidden_layers", 3, "cannot build a network of Qwen2Config for a policy: IndexError"),
    ],
)
def test_an_override_that_the_weights_do_not_fit(field: str, value: int, words: str, refused: Refused) -> None:
    [message] = refused({f"actor_rollout_ref.model.override_config.{field}": value})
    assert words in message


def test_a_number_of_the_weights_that_is_not_finite(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = math.inf
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    arguments = toy.arguments(tmp_path / "run", {MODEL: str(model)})
    assert main(["check", "--format", "json", *arguments]) == 2
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert "1 of the 64 numbers of model.norm.weight are NaN or infinite" in problem["message"]
    assert main(["train", "--local", *arguments]) == 2
    assert problem["message"] in capsys.readouterr().err
    assert main(["check", "--no-files", *arguments]) == 0


def test_without_a_tokenizer_rows_and_rewards_are_checked_all_the_same(
    tmp_path: Path, refused: Refused, model: Path
) -> None:
    (model / "tokenizer.json").write_text("{")
    rows = write_rows(tmp_path / "rows.jsonl", None)
    (tmp_path / "reward.py").write_text("def compute_score(a): ...\n")
    inputs = {MODEL: str(model), ROWS: str(rows), REWARD: str(tmp_path / "reward.py")}
    tokenizer, unchecked, row, reward = refused(inputs)
    assert "cannot be read (JSONDecodeError" in tokenizer
    assert "without a tokenizer neither the chat template nor the lengths of prompts" in unchecked
    assert "rows.jsonl row 1: the prompt is None" in row
    assert "cannot be called with" in reward


def test_without_the_tokenizer_of_a_model_on_the_hub_a_data_source_without_a_rule_is_named(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    rows = write_rows(tmp_path / "rows.jsonl", data_source="nobody/knows")
    changes = {MODEL: "nobody/has-it", ROWS: str(rows), REWARD: "null", "data.val_files": "null"}
    assert main(["check", "--format", "json", *toy.arguments(tmp_path / "run", changes)]) == 2
    problems = json.loads(capsys.readouterr().out)["problems"]
    said = {problem["severity"]: problem["message"] for problem in problems}
    assert "nobody/knows" in said["error"]
    assert "without a tokenizer" in said["warning"]


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_without_a_tokenizer_the_rows_of_other_methods_are_checked_all_the_same(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    (model / "tokenizer.json").write_text("{")
    pair = {"prompt": "say 1", "response": "1", "chosen": "1", "rejected": "2"}
    rows = [pair, pair | {"response": None, "rejected": None}, pair | {"rejected": "3"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [
        f"model={model}",
        f"data={tmp_path / 'rows.jsonl'}",
        f"trainer.method={method}",
        f"output={tmp_path / 'run'}",
    ]
    assert main(["check", "--format", "json", *own]) == 2
    problems = [problem["message"] for problem in json.loads(capsys.readouterr().out)["problems"]]
    assert len(problems) == 3
    assert "1 row cannot be used" in problems[2]
    assert "rows.jsonl row 1" in problems[2]


@pytest.mark.parametrize("key", ["trainer.default_local_dir", "trainer.rollout_data_dir"])
def test_a_folder_that_cannot_be_written(key: str, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "file").touch()
    [message] = refused({key: str(tmp_path / "file" / "x")})
    assert (
        f"{key}={tmp_path}/file/x cannot be written: {tmp_path}/file is not a folder; give a folder that you may"
        in message
    )
