"""Whole GRPO runs with `strategy=megatron` on Ray workers: the answers and metrics of fsdp2, exported and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.observability.run_folder import RunFolder
from tests.backends_megatron.family_models import CONFIGS, hf_model
from tests.models.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.ranks import run_ranks
from tests.trainer.test_workers import answers
from tests.trainer.toy_run import Toy, repeatable, save_toy_data, train_apart

# Two or four workers import Megatron in every run: 25 s each on two quiet cores, minutes on busy ones.
pytestmark = [pytest.mark.e2e, pytest.mark.distributed, pytest.mark.timeout(900)]

A = "actor_rollout_ref.actor"
TOLERANCE = 1e-5
"""float32 sums in another order, over three steps. Adam's epsilon keeps noise from being scaled up to full steps."""
KEYS: dict[str, Any] = {
    f"{A}.optim.eps": 1e-3,
    f"{A}.use_kl_loss": True,
    f"{A}.entropy_coeff": 1e-3,
    "trainer.n_gpus_per_node": 2,
    "ray_init.object_store_memory": 128 << 20,
}
MEGATRON = {f"{A}.strategy": "megatron", f"{A}.megatron.dtype": "float32"}
# Ranks of one data-parallel rank hold the same sequences, so tokens per rank differ between the backends.
PER_RANK = ("global_seqlen/",)


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp2")
    return train_apart(folder, KEYS, use_ray=True)


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor_parallel")
    cut = {f"{A}.megatron.tensor_model_parallel_size": 2, "trainer.save_freq": 3}
    return train_apart(folder, {**KEYS, **MEGATRON, **cut}, use_ray=True)


@pytest.fixture(scope="module")
def pipeline_parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline_parallel")
    cut = {f"{A}.megatron.pipeline_model_parallel_size": 2}
    return train_apart(folder, {**KEYS, **MEGATRON, **cut}, use_ray=True)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pipeline and expert parallel, uneven stages, everything offloaded between phases: 4 processes instead of 512."""
    folder = tmp_path_factory.mktemp("deepseek")
    layout = {
        f"{A}.megatron.pipeline_model_parallel_size": 2,
        f"{A}.megatron.expert_model_parallel_size": 2,
        f"{A}.megatron.override_transformer_config": {
            "num_layers_in_first_pipeline_stage": 3,
            "num_layers_in_last_pipeline_stage": 1,
        },
        f"{A}.megatron.param_offload": True,
        f"{A}.megatron.optimizer_offload": True,
        f"{A}.megatron.grad_offload": True,
        "trainer.n_gpus_per_node": 4,
    }
    return train_apart(folder, {**KEYS, **MEGATRON, **layout}, use_ray=True, make=_deepseek)


@pytest.fixture(scope="module")
def deepseek_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek_alone")
    return train_apart(folder, {**KEYS, "trainer.n_gpus_per_node": 1, f"{A}.strategy": "single"}, make=_deepseek)


def assert_same_run(found: Path, expected: Path, *, tolerance: float = TOLERANCE) -> None:
    ours, theirs = (repeatable(RunFolder(folder).read_metrics()) for folder in (found, expected))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            if not name.startswith(PER_RANK):
                assert mine[name] == pytest.approx(value, abs=tolerance, rel=tolerance), (other["step"], name)
    for row in theirs:
        assert answers(found, row["step"]) == answers(expected, row["step"])


@pytest.mark.slow  # `test_sharded_runs` has a Megatron run in `make test`; this is one more layout
def test_tensor_parallel_runs_give_the_metrics_of_fsdp2_and_an_export(
    tensor_parallel: Path, fsdp2: Path, tmp_path: Path
) -> None:
    assert_same_run(tensor_parallel, fsdp2)
    [seen] = run_ranks(_export_and_compare, 1, tensor_parallel / "global_step_3", tmp_path / "out")
    assert seen["layout"]["tp_size"] == 2
    assert seen["unlike_start"] > 1e-4
    assert seen["log_prob_gap"] < 1e-5


@pytest.mark.slow
def test_pipeline_parallel_runs_give_the_metrics_of_fsdp2(pipeline_parallel: Path, fsdp2: Path) -> None:
    assert_same_run(pipeline_parallel, fsdp2)


@pytest.mark.slow
def test_a_small_deepseek_v3_trains_on_the_layout_of_the_671b_script(deepseek: Path, deepseek_alone: Path) -> None:
    assert_same_run(deepseek, deepseek_alone)


def _deepseek(folder: Path) -> Toy:
    config = CONFIGS["deepseek_v3"]()
    config.vocab_size = VOCAB_SIZE
    hf_model("deepseek_v3", config=config).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    return Toy(folder / "model", save_toy_data(folder / "data"))


def _export_and_compare(rank: int, world_size: int, checkpoint: Path, out: Path) -> dict[str, Any]:
    """Export in a process of its own, then let plain transformers read it and repeat the log-probs of the last step."""
    import torch
    from transformers import AutoModelForCausalLM

    from dovetail.cli.export import export_checkpoint
    from dovetail.config import load_config

    config = load_config([checkpoint.parent / "config.yaml"]).config
    export_checkpoint(config, checkpoint, out)
    trained = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(config.actor_rollout_ref.model.path, dtype=torch.float32)
    gaps = [float((a - b).abs().max()) for a, b in zip(trained.parameters(), start.parameters(), strict=True)]
    ids = torch.randint(3, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(0))
    return {
        "layout": json.loads((checkpoint / "actor" / "state.json").read_text())["layout"],
        "unlike_start": max(gaps),
        "log_prob_gap": _megatron_gap(checkpoint / "actor", out, trained, ids),
    }


def _megatron_gap(checkpoint: Path, folder: Path, trained: Any, ids: Any) -> float:
    import torch

    from dovetail.protocol import DataProto
    from tests.backends_megatron.family_models import megatron_backend

    more = {"use_dist_checkpointing": True, "dist_checkpointing_path": str(checkpoint)}
    backend = megatron_backend(folder, more=more)
    mask = torch.ones_like(ids)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    batch = DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "position_ids": positions})
    [output] = backend.forward([batch])
    with torch.no_grad():
        expected = trained(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return float((output.log_probs[:, 1:] - expected).abs().max())
