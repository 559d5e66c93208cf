"""A checkpoint becomes a folder that plain transformers loads, with the logits of the trained policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.cli.main import main
from tests.trainer.toy_run import Toy, train

pytestmark = pytest.mark.e2e

SAVING = {
    "trainer.save_freq": 1,
    "actor_rollout_ref.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
}


def logits(folder: Path) -> torch.Tensor:
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits


def test_training_saves_a_folder_that_transformers_loads(toy: Toy, tmp_path: Path) -> None:
    """The weights are those of the checkpoint; the log-probs that transformers gives are those of the next step."""
    train(toy.config(tmp_path / "run", SAVING))
    folder = tmp_path / "run" / "global_step_3" / "actor" / "huggingface"
    assert AutoTokenizer.from_pretrained(folder).decode([40, 41]) == AutoTokenizer.from_pretrained(toy.model).decode(
        [40, 41]
    )
    assert not torch.allclose(logits(folder), logits(toy.model), atol=1e-3)
    weights = load_file(folder / "model.safetensors")
    assert all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize("given", ["run", "run/global_step_3"])
def test_the_export_command_writes_the_same_policy(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    train(toy.config(tmp_path / "run", SAVING))
    assert main(["export", str(tmp_path / given), str(tmp_path / "out")]) == 0
    assert "global_step_3" in capsys.readouterr().out
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


def test_what_cannot_be_exported_is_said_and_writes_nothing(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    out = tmp_path / "out"
    for folder, says in [("nothing", "is no folder"), ("run", "is no checkpoint and holds none")]:
        assert main(["export", str(tmp_path / folder), str(out)]) == 2
        assert says in capsys.readouterr().err
    train(toy.config(tmp_path / "run", {"trainer.save_freq": 3}))
    (tmp_path / "run" / "global_step_3" / "actor" / "state.json").write_text("{}")
    assert main(["export", str(tmp_path / "run"), str(out)]) == 2
    assert "state.json" in capsys.readouterr().err
    assert not out.exists()
    out.mkdir()
    assert main(["export", str(tmp_path / "run"), str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
