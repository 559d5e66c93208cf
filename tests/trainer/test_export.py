"""A checkpoint becomes a folder that plain transformers loads, with the logits of the trained policy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.cli.main import main
from dovetail.trainer.groups import create_groups
from tests.hub import FakeApi
from tests.trainer.toy_run import Toy, train
from tests.workers.tiny_run import rollout_batch

pytestmark = pytest.mark.e2e

SAVING = {
    "trainer.save_freq": 1,
    "actor_rollout_ref.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
}
PARAMETERS = "mixed_precision.param_dtype"


def logits(folder: Path) -> torch.Tensor:
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits


def words(folder: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer is not None
    return tokenizer("say 40")["input_ids"]


def test_exports_have_the_chat_template_and_the_dtype_that_was_trained_with(toy: Toy, tmp_path: Path) -> None:
    template = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    section = "actor_rollout_ref.model.custom_chat_template"
    half = {f"actor_rollout_ref.actor.fsdp_config.{name}": "bfloat16" for name in ("model_dtype", PARAMETERS)}
    train(toy.config(tmp_path / "run", {**SAVING, **half, section: template, "trainer.total_training_steps": 1}))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    saved = tmp_path / "run" / "global_step_1" / "actor" / "huggingface"
    for folder, dtype in ((saved, torch.bfloat16), (tmp_path / "wide", torch.float32)):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer is not None
        assert tokenizer.chat_template == template
        assert AutoModelForCausalLM.from_pretrained(folder).dtype == dtype


def test_transformers_gives_the_log_probs_of_the_policy_that_was_saved(toy: Toy, tmp_path: Path) -> None:
    config = toy.config(tmp_path / "run", SAVING)
    train(config)
    saved = tmp_path / "run" / "global_step_3" / "actor"
    groups = create_groups(config, use_ray=False, use_gpu=False)
    groups.actor_rollout.init_model(3)
    groups.actor_rollout.load_checkpoint(str(saved))
    batch = rollout_batch(4)
    ours = groups.actor_rollout.compute_log_prob(batch).tensors["old_log_probs"]

    model = AutoModelForCausalLM.from_pretrained(saved / "huggingface", dtype=torch.float32).eval()
    columns = batch.tensors
    inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        found = (model(**inputs).logits / batch.meta_info["temperature"]).log_softmax(-1)[:, :-1]
    width = columns["responses"].shape[1]
    theirs = found.gather(-1, columns["input_ids"][:, 1:, None]).squeeze(-1)[:, -width:]
    mask = columns["attention_mask"][:, -width:].bool()
    torch.testing.assert_close(ours[mask], theirs[mask], atol=1e-5, rtol=0)
    # Training did something, and the words mean the same.
    assert not torch.allclose(logits(saved / "huggingface"), logits(toy.model), atol=1e-3)
    assert words(saved / "huggingface") == words(toy.model)


def ending_everywhere(toy: Toy, folder: Path) -> Path:
    """The toy's model with further tokens that end an answer, which only its generation config names."""
    shutil.copytree(toy.model, folder)
    file = folder / "generation_config.json"
    # A temperature without sampling: transformers reads this, and refuses to write it.
    changes = {"eos_token_id": [2, *range(100, 320)], "temperature": 0.5, "do_sample": False}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


# Products in half precision take minutes on a CPU without instructions for them.
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)], ids=["shared", "apart"])
def test_tokens_that_end_an_answer_end_it_in_training_and_after_export(toy: Toy, tmp_path: Path, dtype: str) -> None:
    model = ending_everywhere(toy, tmp_path / "model")
    keys = {
        **SAVING,
        "trainer.total_training_steps": 1,
        "actor_rollout_ref.model.path": str(model),
        # The engine shares the trainer's weights where both have one precision.
        "actor_rollout_ref.rollout.dtype": dtype,
    }
    train(toy.config(tmp_path / "run", keys))
    lines = (tmp_path / "run" / "rollouts" / "step_1.jsonl").read_text().splitlines()
    answers = [json.loads(line)["response_ids"] for line in lines]
    assert all(token < 100 for answer in answers for token in answer[:-1])
    assert any(len(answer) < 8 and answer[-1] >= 100 for answer in answers)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    for folder in (tmp_path / "out", tmp_path / "run" / "global_step_1" / "actor" / "huggingface"):
        assert (folder / "generation_config.json").read_text() == (model / "generation_config.json").read_text()


@pytest.mark.parametrize("given", ["run", "run/global_step_3"])
def test_the_export_command_writes_the_same_policy(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    train(toy.config(tmp_path / "run", SAVING))
    assert main(["export", str(tmp_path / given), str(tmp_path / "out"), "--push-to-hub", "mine"]) == 2
    assert "is no name on the hub" in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "said before the model is written"
    hub = FakeApi.install(monkeypatch)
    assert main(["export", str(tmp_path / given), str(tmp_path / "out"), "--push-to-hub", "org/mine"]) == 0
    said = capsys.readouterr().out
    assert "global_step_3" in said
    assert "on the hub as org/mine" in said
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(hub.uploads["org/mine"])
    saved = tmp_path / "run" / "global_step_3" / "actor" / "huggingface"
    assert torch.equal(logits(tmp_path / "out"), logits(saved))
    first, second = load_file(tmp_path / "out" / "model.safetensors"), load_file(saved / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_lora_adapters_are_merged_and_the_dtype_is_as_asked(toy: Toy, tmp_path: Path) -> None:
    lora = {"actor_rollout_ref.model.lora_rank": 4, "actor_rollout_ref.model.target_modules": "all-linear"}
    train(toy.config(tmp_path / "run", {**SAVING, **lora, "actor_rollout_ref.actor.optim.lr": 1e-2}))
    saved = tmp_path / "run" / "global_step_3" / "actor" / "huggingface"
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert torch.equal(logits(tmp_path / "out"), logits(saved))
    assert not torch.allclose(logits(saved), logits(toy.model), atol=1e-3)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert {weight.dtype for weight in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_cannot_be_exported_is_said_and_writes_nothing(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    out = tmp_path / "out"
    for folder, says in [("nothing", "is no folder"), ("run", "is no checkpoint and holds none")]:
        assert main(["export", str(tmp_path / folder), str(out)]) == 2
        assert says in capsys.readouterr().err
    train(toy.config(tmp_path / "run", {"trainer.save_freq": 3}))
    with monkeypatch.context() as full:
        reason = "Error while serializing: I/O error: No space left on device (os error 28)"
        full.setattr("dovetail.models.save.save_file", Mock(side_effect=SafetensorError(reason)))
        assert main(["export", str(tmp_path / "run"), str(out)]) == 2
    assert f"{out} could not be written, the disk is full" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "run" / "global_step_3" / "actor" / "state.json").write_text("{}")
    assert main(["export", str(tmp_path / "run"), str(out)]) == 2
    assert "state.json" in capsys.readouterr().err
    assert not out.exists()
    out.mkdir()
    assert main(["export", str(tmp_path / "run"), str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
