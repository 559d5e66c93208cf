"""Checkpoints of the Megatron backend: saved on one layout, loaded on others, with the same next step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.backends.base import TokenOutput
from dovetail.config.optim import OptimConfig
from dovetail.protocol import DataProto
from tests.backends_megatron.family_models import CONFIGS, VOCAB_SIZE, megatron_backend, save_folder
from tests.ranks import run_alone, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

# Near-zero gradients make Adam's step depend on rounding; a large epsilon keeps layouts comparable.
OPTIM = OptimConfig(lr=1e-2, eps=1e-3, lr_warmup_steps=2, total_training_steps=8, weight_decay=0.1)
SAVED_ON: dict[str, dict[str, Any]] = {
    "qwen2": {"tp": 2},
    "deepseek_v3": {"pp": 2, "override": {"num_layers_in_first_pipeline_stage": 1}},
}
LOADED_ON: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen2": ({"tp": 2}, {"pp": 2}, {}),
    "deepseek_v3": (
        {"pp": 2, "override": {"num_layers_in_first_pipeline_stage": 1}},
        {"ep": 2},
        {"tp": 2, "ep": 2, "etp": 1},
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("results")
    run_alone(_save_models, folder)
    return run_ranks(_all_cases, 2, folder, timeout=280)[0] | {"root": folder}


def _save_models(rank: int, world_size: int, root: Path) -> None:
    for name in SAVED_ON:
        save_folder(name, root / name)


@pytest.mark.parametrize("name", SAVED_ON)
def test_the_same_layout_continues_to_the_bit(results: dict[str, Any], name: str) -> None:
    assert results[name]["gaps"][0] == {"loaded": 0.0, "next": 0.0}


@pytest.mark.parametrize("name", SAVED_ON)
def test_other_layouts_load_the_same_weights_and_take_the_same_next_step(results: dict[str, Any], name: str) -> None:
    for gap in results[name]["gaps"][1:]:
        assert gap["loaded"] == 0.0
        assert gap["next"] < 1e-6


@pytest.mark.parametrize("name", SAVED_ON)
def test_schedule_skips_and_the_callers_own_values_come_back(results: dict[str, Any], name: str) -> None:
    for found in results[name]["restored"]:
        assert found == {"extra": {"num_updates": 2}, "lr": results[name]["lr"]}


def test_weights_alone_can_be_loaded_and_the_optimizer_starts_fresh_from_them(results: dict[str, Any]) -> None:
    assert results["weights_only"] == {"loaded": 0.0, "masters": 0.0}


def test_a_checkpoint_before_the_first_step_has_no_optimizer_state_and_resumes(results: dict[str, Any]) -> None:
    assert results["before_steps"] == {"loaded": 0.0, "next": 0.0}


def test_start_weights_come_from_a_megatron_folder(results: dict[str, Any]) -> None:
    assert results["dist_weights"] == 0.0
    assert results["dist_value_head"] is True


def test_optimizers_that_are_not_distributed_resume_as_well(results: dict[str, Any]) -> None:
    assert results["plain_optimizer"] == {"loaded": 0.0, "next": 0.0}


def test_half_precision_resumes_with_its_float32_masters(results: dict[str, Any]) -> None:
    assert results["bfloat16"] == {"loaded": 0.0, "next": 0.0}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("fewer layers", "this run's model has no decoder.layers.2."),
        ("more layers", "it has no decoder.layers.4."),
        ("wider", "mlp.linear_fc1.weight has shape (4, 96, 32) in it and (4, 128, 32) in this run"),
        ("fewer tokens", "embedding.word_embeddings.weight has shape (102, 32) in it and (96, 32) in this run"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name_and_loads_nothing(
    results: dict[str, Any], case: str, message: str
) -> None:
    found = results["other_models"][case]
    assert message in found["refusal"]
    assert "set what the model was saved with" in found["refusal"]
    assert found["changed"] == 0.0


def test_the_folder_says_who_wrote_it_and_other_backends_refuse_it(results: dict[str, Any]) -> None:
    description = json.loads((results["root"] / "qwen2-saved" / "state.json").read_text())
    assert (description["backend"], description["layout"]["tp_size"]) == ("megatron", 2)
    assert description["optimizer_steps"] == 2
    assert "saved by the megatron backend" in results["other_backend"]
    assert "saved by another training backend" in results["from_other_backend"]


def _all_cases(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, layout in SAVED_ON.items():
        saved = root / f"{name}-saved"
        backend = megatron_backend(root / name, optim=OPTIM, **layout)
        _step(backend, 0), _step(backend, 1)
        backend.save_state(saved, extra={"num_updates": 2})
        at_save = _weights(backend)
        lr = _step(backend, 2)
        after = _weights(backend)
        case: dict[str, Any] = {"gaps": [], "restored": [], "lr": lr}
        for other in LOADED_ON[name]:
            backend = megatron_backend(root / name, optim=OPTIM, **other)
            extra = backend.load_state(saved)
            loaded = _gap(_weights(backend), at_save)
            case["restored"].append({"extra": extra, "lr": _step(backend, 2)})
            case["gaps"].append({"loaded": loaded, "next": _gap(_weights(backend), after)})
        found[name] = case
        if name == "qwen2":
            found |= _other_contents(root, at_save)
    return found | _other_optimizers(root) | _other_models(root, rank) | _other_backends(root, rank)


def _other_contents(root: Path, at_save: dict[str, Tensor]) -> dict[str, Any]:
    backend = megatron_backend(root / "qwen2", optim=OPTIM, pp=2)
    _step(backend, 5)
    backend.load_state(root / "qwen2-saved", contents=("model",))
    loaded = _gap(_weights(backend), at_save)
    # With a learning rate of 0 a step writes the master copies back.
    backend._stepper.optimizer.reload_model_params()
    found: dict[str, Any] = {"weights_only": {"loaded": loaded, "masters": _gap(_weights(backend), at_save)}}
    fresh = megatron_backend(root / "qwen2", optim=OPTIM)
    fresh.save_state(root / "fresh")
    start = _weights(fresh)
    _step(fresh, 0)
    after = _weights(fresh)
    again = megatron_backend(root / "qwen2", optim=OPTIM)
    _step(again, 3)
    again.load_state(root / "fresh")
    gap = {"loaded": _gap(_weights(again), start)}
    _step(again, 0)
    found["before_steps"] = gap | {"next": _gap(_weights(again), after)}
    more = {"use_dist_checkpointing": True, "dist_checkpointing_path": str(root / "qwen2-saved")}
    found["dist_weights"] = _gap(_weights(megatron_backend(root / "qwen2", pp=2, more=more)), at_save)
    critic = megatron_backend(root / "qwen2", role="value", tp=2, more=more)
    head = _weights(critic)["score.weight"]
    plain = _weights(megatron_backend(root / "qwen2", role="value", tp=2))["score.weight"]
    found["dist_value_head"] = bool(torch.equal(head, plain) and head.abs().sum() > 0)
    return found


def _other_optimizers(root: Path) -> dict[str, Any]:
    cases: dict[str, dict[str, Any]] = {
        "plain_optimizer": {"tp": 2, "more": {"use_distributed_optimizer": False}},
        "bfloat16": {"dtype": "bfloat16"},
    }
    found = {}
    for case, options in cases.items():
        backend = megatron_backend(root / "qwen2", optim=OPTIM, **options)
        _step(backend, 0)
        backend.save_state(root / case)
        at_save = _weights(backend)
        _step(backend, 1)
        after = _weights(backend)
        backend = megatron_backend(root / "qwen2", optim=OPTIM, **options)
        backend.load_state(root / case)
        loaded = _gap(_weights(backend), at_save)
        _step(backend, 1)
        found[case] = {"loaded": loaded, "next": _gap(_weights(backend), after)}
    return found


def _other_models(root: Path, rank: int) -> dict[str, Any]:
    from dovetail.checkpoint.manifest import BrokenCheckpoint

    cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "fewer layers": ("deepseek_v3", {"num_hidden_layers": 2}, {"ep": 2}),
        # Only the second stage asks for what is not there.
        "more layers": ("deepseek_v3", {"num_hidden_layers": 6}, {"pp": 2}),
        "wider": ("qwen2", {"intermediate_size": 64}, {"tp": 2}),
        "fewer tokens": ("qwen2", {"vocab_size": 96}, {"tp": 2}),
    }
    found: dict[str, Any] = {}
    for case, (name, changes, layout) in cases.items():
        folder = root / f"{name}, {case}"
        if rank == 0:
            config = CONFIGS[name]()
            config.update(changes)
            save_folder(name, folder, config=config)
        dist.barrier()
        backend = megatron_backend(folder, optim=OPTIM, **layout)
        before = _weights(backend)
        with pytest.raises(BrokenCheckpoint) as refused:
            backend.load_state(root / f"{name}-saved")
        found[case] = {"refusal": str(refused.value), "changed": _gap(_weights(backend), before)}
    return {"other_models": found}


def _other_backends(root: Path, rank: int) -> dict[str, str]:
    from dovetail.backends.build import build_backend
    from dovetail.checkpoint.manifest import BrokenCheckpoint
    from dovetail.config.fsdp import FSDPConfig
    from dovetail.models.load import build_meta_model
    from dovetail.models.policy import PolicyModel

    network = PolicyModel(build_meta_model(root / "qwen2", "policy"))
    plain = build_backend("fsdp2", network, weights=root / "qwen2", fsdp=FSDPConfig(), optim=OPTIM)
    with pytest.raises(BrokenCheckpoint) as refused:
        plain.load_state(root / "qwen2-saved")
    plain.save_state(root / "plain")
    backend = megatron_backend(root / "qwen2", optim=OPTIM)
    with pytest.raises(BrokenCheckpoint) as also_refused:
        backend.load_state(root / "plain")
    return {"other_backend": str(refused.value), "from_other_backend": str(also_refused.value)}


def _step(backend: Any, seed: int) -> float:
    """One optimizer step on rows that depend on `seed` and on nothing else; its learning rate."""
    place = backend.rank_info
    rows = _batch(seed)
    size = len(rows) // place.dp_size
    mine = rows[place.dp_rank * size : (place.dp_rank + 1) * size]
    backend.forward_backward([mine[:1], mine[1:]], _loss)
    return backend.optim_step().lr


def _batch(seed: int) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (4, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[2, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "position_ids": positions})


def _loss(output: TokenOutput, micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
    assert output.log_probs is not None
    return -output.log_probs.sum() / 40, {}


def _weights(backend: Any) -> dict[str, Tensor]:
    return {name: tensor.float().clone() for name, tensor in backend.named_weights()}


def _gap(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
