"""Runs that continue an adapter: each method starts from what the adapter has learned, and exports what it adds."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import dovetail
from dovetail.cli.main import main
from dovetail.config import ConfigError, load_config
from dovetail.config.root import DovetailConfig
from dovetail.data.files import write_rows
from dovetail.models.errors import ModelError
from dovetail.trainer.groups import create_groups
from tests.trainer.toy_run import Toy, make_toy, repeatable, save_toy_model, train
from tests.workers.tiny_run import rollout_batch

pytestmark = pytest.mark.e2e

M, A = "actor_rollout_ref.model", "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Trained:
    """What a run of adapters has left: the adapter, and the model with it merged in."""

    toy: Toy
    adapter: Path
    merged: Path
    rows: Path
    pairs: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("adapters")
    toy = make_toy(folder)
    keys = {f"{M}.lora_rank": 4, f"{M}.lora_alpha": 12, f"{A}.optim.lr": 3e-2, "trainer.save_freq": 2}
    train(toy.config(folder / "run", keys | {"trainer.total_training_steps": 2}))
    assert main(["export", str(folder / "run"), str(folder / "merged")]) == 0
    assert main(["export", str(folder / "run"), str(folder / "adapter"), "--adapter"]) == 0
    rows = [{"prompt": f"say {number}", "response": str(number) * 3} for number in range(8)]
    pairs = [{"prompt": f"say {number}", "chosen": str(number) * 2, "rejected": "abc"} for number in range(8)]
    write_rows(rows, folder / "rows.jsonl")
    write_rows(pairs, folder / "pairs.jsonl")
    return Trained(toy, folder / "adapter", folder / "merged", folder / "rows.jsonl", folder / "pairs.jsonl")


def config(trained: Trained, run: Path, changes: dict[str, Any], *, section: str = M) -> DovetailConfig:
    """Of a run that continues the adapter. Built as a command builds it: the adapter's own values are read then."""
    keys = {f"{section}.lora_adapter_path": str(trained.adapter), "trainer.total_training_steps": 2} | changes
    return load_config(values=trained.toy.keys(run, keys)).config


def methods(trained: Trained) -> dict[str, tuple[dict[str, Any], str]]:
    """For each method its keys, and a metric of the first step that tells what it began with."""
    data = {"custom_reward_function.path": None, "data.max_response_length": 16, "data.max_prompt_length": 64}
    sft, pairs = (data | {"data.train_files": str(file)} for file in (trained.rows, trained.pairs))
    teacher = {"distill.teacher.path": str(trained.toy.model), "custom_reward_function.path": None}
    return {
        "rl": ({}, "actor/entropy"),
        "sft": (sft, "train/loss"),
        "dpo": (pairs | {"dpo.loss_type": "simpo"}, "train/loss"),
        "reward": (pairs, "train/margin"),
        "distill": (teacher, "distill/kl"),
    }


@pytest.mark.parametrize("method", ["rl", "sft", "dpo", "reward", "distill"])
def test_every_method_starts_from_what_the_adapter_has_learned(method: str, trained: Trained, tmp_path: Path) -> None:
    changes, metric = methods(trained)[method]
    changes = changes | {"trainer.method": method}
    section = "critic.model" if method == "reward" else M
    _, rows = train(config(trained, tmp_path / "continued", changes, section=section))
    plain = changes | {"trainer.total_training_steps": 1}
    starts = {}
    for name, model in (("merged", trained.merged), ("base", trained.toy.model)):
        paths = dict.fromkeys((f"{M}.path", "critic.model.path"), str(model))
        _, (row, *_) = train(trained.toy.config(tmp_path / name, plain | paths))
        starts[name] = row[metric]
    assert rows[0][metric] == pytest.approx(starts["merged"], rel=1e-4, abs=1e-5)
    assert abs(starts["merged"] - starts["base"]) > 1e-3
    assert rows[1][metric] != rows[0][metric]


def test_engine_trainer_and_export_have_the_adapter_and_the_reference_has_it_off(
    trained: Trained, tmp_path: Path
) -> None:
    groups = create_groups(config(trained, tmp_path, {f"{A}.use_kl_loss": True}), use_ray=False, use_gpu=False)
    actor: Any = groups.actor_rollout
    actor.init_model()
    batch = rollout_batch(4)
    assert groups.ref is not None
    merged, base = (log_probs_of(folder, batch) for folder in (trained.merged, trained.toy.model))
    mask = batch.tensors["attention_mask"][:, -batch.tensors["responses"].shape[1] :].bool()
    close = {"atol": 1e-5, "rtol": 0.0}
    torch.testing.assert_close(actor.compute_log_prob(batch).tensors["old_log_probs"][mask], merged[mask], **close)
    torch.testing.assert_close(
        groups.ref.compute_ref_log_prob(batch).tensors["ref_log_prob"][mask], base[mask], **close
    )
    assert (merged - base)[mask].abs().max() > 1e-2
    assert actor.worker.check_parity().mean_abs_diff <= 1e-5
    actor.export_model(str(tmp_path / "out"))
    first, again = (load_file(folder / "model.safetensors") for folder in (trained.merged, tmp_path / "out"))
    assert all(torch.equal(first[name], again[name]) for name in first)


def log_probs_of(folder: Path, batch: Any) -> torch.Tensor:
    model, columns = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), batch.tensors
    inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        found = (model(**inputs).logits / batch.meta_info["temperature"]).log_softmax(-1)[:, :-1]
    return found.gather(-1, columns["input_ids"][:, 1:, None]).squeeze(-1)[:, -columns["responses"].shape[1] :]


def test_the_reference_of_dpo_is_the_policy_with_the_adapter_that_it_starts_from(
    trained: Trained, tmp_path: Path
) -> None:
    changes = methods(trained)["dpo"][0] | {"trainer.method": "dpo", "dpo.loss_type": "sigmoid"}
    changes |= {"data.val_files": str(trained.pairs), "trainer.val_before_train": True}
    changes |= {"trainer.save_freq": 1, "trainer.test_freq": 1}
    _, rows = train(config(trained, tmp_path / "whole", changes))
    assert rows[0]["val/rewards/margins"] == 0
    train(config(trained, tmp_path / "part", changes | {"trainer.total_training_steps": 1}))
    # Its later start computes some of the reference again, and compares.
    _, again = train(config(trained, tmp_path / "part", changes))
    assert repeatable(again) == repeatable(rows)


def test_a_continued_run_resumes_and_is_exported_without_the_first_adapter(trained: Trained, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(trained.adapter, mine)
    changes = {f"{M}.lora_adapter_path": str(mine), "trainer.save_freq": 1}
    _, whole = train(config(trained, tmp_path / "whole", changes))
    train(config(trained, tmp_path / "run", changes | {"trainer.total_training_steps": 1}))
    _, rows = train(config(trained, tmp_path / "run", changes))
    assert repeatable(rows) == repeatable(whole)
    shutil.rmtree(mine)
    for options, name in (((), "merged"), (("--adapter",), "adapter")):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / name), *options]) == 0
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 12)
    first, last = (
        load_file(folder / "adapter_model.safetensors") for folder in (trained.adapter, tmp_path / "adapter")
    )
    assert first.keys() == last.keys()
    assert all(not torch.equal(first[name], last[name]) for name in first)
    out = str(tmp_path / "said.jsonl")
    assert main(["generate", str(tmp_path / "run"), "say 7", "--max-tokens", "4", "--jsonl", out]) == 0
    with pytest.raises(ConfigError, match=r"adapter_config.json cannot be read"):
        train(config(trained, tmp_path / "run", changes))


def test_what_does_not_fit_is_said_before_a_process_starts(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{M}.lora_rank=8, and the adapter that training continues has 4"):
        train(config(trained, tmp_path, {f"{M}.lora_rank": 8}))
    with pytest.raises(ConfigError, match="lora_rank=0, and the adapter that training continues has 4"):
        train(trained.toy.config(tmp_path, {f"{M}.lora_adapter_path": str(trained.adapter)}))  # nobody read it
    other = save_toy_model(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".layers.1." not in name}
    save_file(kept, other / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 1, "layer_types": None}))
    with pytest.raises(ModelError, match=r"layers\.1\..*has no place in this model"):
        train(config(trained, tmp_path, {f"{M}.path": str(other)}))
    with pytest.raises(ModelError, match=r"holds no weights for .*lm_head|has no place"):
        train(config(trained, tmp_path, {f"{M}.target_modules": ["q_proj"]}))
    assert not (tmp_path / "config.yaml").exists()


def test_a_script_continues_an_adapter(trained: Trained, tmp_path: Path) -> None:
    keys: dict[str, Any] = trained.toy.keys(tmp_path, {f"{M}.lora_adapter_path": str(trained.adapter)})
    for name in ("data.train_files", f"{M}.path", "trainer.total_training_steps"):
        del keys[name]
    data = str(trained.toy.data / "train.parquet")
    trainer = dovetail.GRPO(trained.toy.model, data, steps=1, ray=False, config=keys)
    assert trainer.config.actor_rollout_ref.model.lora_rank == 4
    assert trainer.train().steps == 1


def test_ppo_with_adapters_in_actor_and_critic_resumes_exactly(toy: Toy, tmp_path: Path) -> None:
    """The critic's adapters and its head learn; the model under them stays."""
    changes = {
        "algorithm.adv_estimator": "gae",
        f"{M}.lora_rank": 4,
        "critic.model.lora_rank": 8,
        "critic.model.lora_alpha": 16,
        "critic.optim.lr": 1e-2,
        "critic.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        "trainer.save_freq": 1,
        "trainer.total_training_steps": 2,
    }
    _, rows = train(toy.config(tmp_path / "whole", changes))
    train(toy.config(tmp_path / "part", changes | {"trainer.total_training_steps": 1}))
    _, again = train(toy.config(tmp_path / "part", changes))
    assert repeatable(again) == repeatable(rows)
    first, last, base = (
        load_file(folder / "model.safetensors")
        for folder in (*(tmp_path / "whole" / f"global_step_{n}" / "critic" / "huggingface" for n in (1, 2)), toy.model)
    )
    layer = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[layer], last[layer])
    assert not torch.equal(first["score.weight"], last["score.weight"])
    assert torch.equal(last["model.norm.weight"], base["model.norm.weight"])
    assert rows[-1]["critic/grad_norm"] > 0
