"""A base model with a chat template of another end than its generation config names: taught, exported and asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.cli.main import main
from dovetail.data.files import write_rows
from dovetail.models.stop_ids import GENERATION_CONFIG
from dovetail.observability.run_folder import read_json_lines
from tests.agents.chatml import EOS, TURN_END, save_chatml_model
from tests.trainer.toy_run import Toy, save_toy_data, toy_rows, train

pytestmark = pytest.mark.e2e

QUESTIONS = ("a", "b", "c", "d")
LIMIT = 12


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("chatml")
    save_toy_data(folder)
    write_rows([{"prompt": f"say {one}", "response": one * 2} for one in QUESTIONS], folder / "talks.jsonl")
    return Toy(save_chatml_model(folder / "model"), folder)


@pytest.fixture(scope="module")
def taught(toy: Toy) -> Path:
    """The run folder of a fine-tuning."""
    changes = {
        "trainer.method": "sft",
        "custom_reward_function.path": None,
        "data.train_files": str(toy.data / "talks.jsonl"),
        "data.val_files": str(toy.data / "talks.jsonl"),
        "data.max_length": 64,
        "sft.val_sample_tokens": LIMIT,
        "trainer.total_training_steps": 30,
        "trainer.total_epochs": 30,
        "trainer.save_freq": 30,
        "actor_rollout_ref.actor.optim.lr": 1e-2,
    }
    run = toy.data / "run"
    train(toy.config(run, changes))
    return run


@pytest.fixture(scope="module")
def exported(taught: Path) -> Path:
    out = taught.parent / "exported"
    assert main(["export", str(taught), str(out)]) == 0
    return out


def test_validation_samples_end_where_the_template_ends_a_turn(taught: Path) -> None:
    rows = list(read_json_lines(taught / "validation" / "step_30.jsonl"))
    assert len(rows) == len(QUESTIONS)
    assert [(row["truncated"], row["length"]) for row in rows] == [(False, len(row["response"]) + 1) for row in rows]


@pytest.mark.parametrize("of", ["taught", "exported"])
def test_generate_ends_there(of: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder, out = request.getfixturevalue(of), tmp_path / "said.jsonl"
    arguments = ["generate", str(folder), "say a", "say b", "--jsonl", str(out), "--max-tokens", str(LIMIT)]
    assert main(arguments) == 0
    said = [sample for row in read_json_lines(out) for sample in row.get("responses", [row])]
    assert said
    assert {sample["finish_reason"] for sample in said} == {"stop"}


def test_plain_transformers_stops_after_the_export_and_not_with_the_first_generation_config(
    toy: Toy, exported: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    model: Any = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say a"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )

    def answered(generation: Any) -> list[int]:
        options = {"do_sample": False, "max_new_tokens": LIMIT, "generation_config": generation}
        return model.generate(**asked, **options)[0, asked["input_ids"].shape[1] :].tolist()

    ids = answered(None)
    assert ids.index(TURN_END) == len(ids) - 1 < LIMIT - 1
    assert len(answered(GenerationConfig.from_pretrained(toy.model))) == LIMIT
    first = json.loads((toy.model / GENERATION_CONFIG).read_text())
    assert json.loads((exported / GENERATION_CONFIG).read_text()) == first | {"eos_token_id": [EOS, TURN_END]}


def test_responses_of_rl_end_there_and_at_the_ids_of_the_run(toy: Toy, exported: Path, tmp_path: Path) -> None:
    """From the exported weights beside the base model's generation config: the run asks the template."""
    model = Path(shutil.copytree(exported, tmp_path / "model"))
    (model / GENERATION_CONFIG).write_bytes((toy.model / GENERATION_CONFIG).read_bytes())
    rl = Toy(model, toy.data)
    write_rows(toy_rows(8, question="say"), tmp_path / "train.parquet")
    prompts = {"data.train_files": str(tmp_path / "train.parquet"), "trainer.total_training_steps": 1}
    rl_keys = {**prompts, "actor_rollout_ref.rollout.response_length": LIMIT, "data.max_response_length": LIMIT}
    _, rows = train(rl.config(tmp_path / "turns", rl_keys))
    assert rows[-1]["response_length/clip_ratio"] < 1.0
    letter = {"actor_rollout_ref.rollout.stop_token_ids": list(range(3, 259))}
    _, rows = train(rl.config(tmp_path / "letters", {**rl_keys, **letter}))
    assert rows[-1]["response_length/max"] == 1.0


def test_check_says_it_in_a_notice(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *toy.arguments(tmp_path / "run"), "--format", "json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    said = [one["message"] for one in checked["notices"] if "the chat template ends a turn with" in one["message"]]
    assert len(said) == 1
    assert f"(id {TURN_END})" in said[0]
    assert checked["looked_at"]
