"""What `MegatronBackend` promises beside the update itself: outputs, gradients, offload, skipped steps, schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.backends.base import ForwardOptions, LossFn, TokenOutput, TrainBackend
from dovetail.config.fsdp import FSDPConfig, MixedPrecisionConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.model import ModelConfig, RewardNetworkConfig
from dovetail.config.optim import OptimConfig
from dovetail.protocol import DataProto
from dovetail.workers.build import build_policy, build_reward
from tests.backends.tiny import as_numpy, largest_difference
from tests.ranks import run_alone, run_ranks
from tests.workers.tiny_run import rollout_batch, save_classifier, small_model

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

FP32 = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float32"))
OPTIM = OptimConfig(
    lr=1e-2, eps=1e-3, weight_decay=0.1, lr_warmup_steps=2, lr_scheduler_type="cosine", total_training_steps=6
)
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
OFFLOAD: dict[str, Any] = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}


@dataclass(frozen=True)
class Folders:
    policy: Path
    reward: Path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each part of this module asks of two processes, in one start of them; of the second rank."""
    folder = tmp_path_factory.mktemp("found")
    return run_ranks(run_parts, 2, run_alone(save_models, folder), timeout=300.0)[1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same of one process without Megatron."""
    folder = tmp_path_factory.mktemp("plain")
    return run_alone(run_plain, run_alone(save_models, folder))


def save_models(rank: int, world_size: int, folder: Path) -> Folders:
    return Folders(small_model(folder / "policy"), save_classifier(folder / "reward"))


def run_plain(rank: int, world_size: int, folders: Folders) -> dict[str, Any]:
    backend = build(folders.policy, None)
    three = steps(backend, 3)
    fresh = build(folders.policy, None)
    fresh.forward_backward(parts(), nll)
    return {
        "outputs": outputs(build(folders.policy, None)),
        "scores": scores(folders.reward, None),
        "gradients": as_numpy(fresh.named_gradients()),
        "steps": three,
    }


def run_parts(rank: int, world_size: int, folders: Folders) -> dict[str, Any]:
    """All parts; each frees its layout for the next."""
    from tests.megatron_groups import destroy_layout

    every: dict[str, Callable[[], Any]] = {
        "outputs TP2": lambda: outputs(build(folders.policy, TP2)),
        "outputs PP2": lambda: outputs(build(folders.policy, PP2)),
        "scores TP2": lambda: scores(folders.reward, TP2),
        "scores PP2": lambda: scores(folders.reward, PP2),
        "gradients TP2": lambda: gradients(folders.policy, TP2),
        "gradients PP2": lambda: gradients(folders.policy, PP2),
        "gradients DP2": lambda: gradients(folders.policy, {}),
        "steps TP2": lambda: steps(build(folders.policy, TP2), 3),
        "steps DP2, offload": lambda: offloaded_steps(folders.policy, OFFLOAD),
        "steps PP2, offload, whole optimizer": lambda: offloaded_steps(
            folders.policy, OFFLOAD | PP2 | {"use_distributed_optimizer": False}
        ),
        "bfloat16 TP2": lambda: half_steps(folders.policy, TP2),
        "bfloat16 DP2, offload": lambda: half_steps(folders.policy, OFFLOAD),
        "skipped": lambda: skipped_step(folders.policy),
        "two roles": lambda: two_roles(folders),
        "another layout": lambda: another_layout(folders.policy),
        "too many stages": lambda: too_many(folders.policy),
    }
    result = {}
    for name, part in every.items():
        result[name] = part()
        destroy_layout()
    return result


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_log_probs_entropies_and_best_log_probs_are_those_of_one_process(
    layout: str, found: dict[str, Any], plain: dict[str, Any]
) -> None:
    for name, expected in plain["outputs"].items():
        np.testing.assert_allclose(found[f"outputs {layout}"][name], expected, atol=3e-6, rtol=0, err_msg=name)


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_a_reward_model_scores_as_in_one_process(layout: str, found: dict[str, Any], plain: dict[str, Any]) -> None:
    np.testing.assert_allclose(found[f"scores {layout}"], plain["scores"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("layout", ["TP2", "PP2", "DP2"])
def test_named_gradients_are_whole_on_every_rank(layout: str, found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert largest_difference(found[f"gradients {layout}"], plain["gradients"]) < 1e-5


@pytest.mark.parametrize("layout", ["TP2", "DP2, offload", "PP2, offload, whole optimizer"])
def test_three_steps_on_a_schedule_are_those_of_one_process(
    layout: str, found: dict[str, Any], plain: dict[str, Any]
) -> None:
    rates, norms, weights = found[f"steps {layout}"]
    expected_rates, expected_norms, expected_weights = plain["steps"]
    assert rates == expected_rates
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert largest_difference(weights, expected_weights) < 1e-5


@pytest.mark.parametrize("layout", ["TP2", "DP2, offload"])
def test_bfloat16_keeps_float32_masters(layout: str, found: dict[str, Any], plain: dict[str, Any]) -> None:
    _, norms, weights = found[f"bfloat16 {layout}"]
    # Weights below 1 keep 8 bits: 0.004. A step that was lost to rounding would show in the norms of the next ones.
    assert largest_difference(weights, plain["steps"][2]) < 0.02
    assert norms == pytest.approx(plain["steps"][1], rel=0.05)


def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(found: dict[str, Any]) -> None:
    norm, skipped, count, moved, after = found["skipped"]
    assert not math.isfinite(norm)
    assert skipped
    assert count == 1
    assert moved == 0.0
    assert math.isfinite(after)


def test_memory_of_an_offloaded_backend_is_given_back(found: dict[str, Any]) -> None:
    weights, gradients, moments = found["two roles"]["bytes"]
    assert (weights, gradients, moments) == (0, 0, 0)


def test_roles_in_one_process_share_a_layout(found: dict[str, Any], plain: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["two roles"]["scores"], plain["scores"], atol=1e-6, rtol=0)


def test_another_layout_in_the_same_process_is_refused(found: dict[str, Any]) -> None:
    assert "tensor_model_parallel_size=1" in found["another layout"]
    assert "the same sizes" in found["another layout"]


def test_a_layout_larger_than_the_group_is_refused(found: dict[str, Any]) -> None:
    assert "does not divide the 2 processes" in found["too many stages"]


def build(folder: Path, megatron: dict[str, Any] | None, *, dtype: str = "float32", optim: bool = True) -> TrainBackend:
    """On Megatron, or in one process where `megatron` is None."""
    return build_policy(
        ModelConfig(path=str(folder), enable_gradient_checkpointing=False),
        strategy="single" if megatron is None else "megatron",
        fsdp=FP32,
        megatron=MegatronConfig(dtype=dtype, **(megatron or {})),  # pyrefly: ignore[bad-argument-type]
        optim=OPTIM if optim else None,
        device=torch.device("cpu"),
    )


def parts(backend: TrainBackend | None = None) -> list[DataProto]:
    """Micro-batches of 3, 3 and 2 rows; half of them where two ranks share the rows."""
    place = None if backend is None else backend.rank_info
    batch = rollout_batch(8)
    if place is not None:
        batch = batch.chunk(place.dp_size)[place.dp_rank]
    return [batch[start : start + 3] for start in range(0, len(batch), 3)]


def nll(output: TokenOutput, micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
    assert output.log_probs is not None
    loss = -output.log_probs.sum() / 50
    return loss, {"loss": loss.detach()}


def outputs(backend: TrainBackend) -> dict[str, np.ndarray]:
    options = ForwardOptions(temperature=0.7, entropy=True, best=True, last_tokens=8)
    results = backend.forward(parts(), options)
    return {
        name: np.concatenate([getattr(result, name).numpy() for result in results])
        for name in ("log_probs", "entropy", "best")
    }


def scores(folder: Path, megatron: dict[str, Any] | None) -> np.ndarray:
    backend = build_reward(
        RewardNetworkConfig(path=str(folder), fsdp_config=FP32),
        strategy="single" if megatron is None else "megatron",
        megatron=MegatronConfig(dtype="float32", **(megatron or {})),
        device=torch.device("cpu"),
    )
    found = [output.scores for output in backend.forward(parts())]
    return torch.cat([score for score in found if score is not None]).numpy()


def gradients(folder: Path, megatron: dict[str, Any]) -> dict[str, np.ndarray]:
    backend = build(folder, megatron)
    backend.forward_backward(parts(backend), nll)
    return as_numpy(backend.named_gradients())


def steps(backend: TrainBackend, count: int, loss_fn: LossFn = nll) -> tuple[list[float], list[float], dict[str, Any]]:
    rates, norms = [], []
    for _ in range(count):
        backend.forward_backward(parts(backend), loss_fn)
        step = backend.optim_step()
        rates.append(step.lr)
        norms.append(step.grad_norm)
    return rates, norms, as_numpy((name, weight.float()) for name, weight in backend.named_weights())


def offloaded_steps(folder: Path, megatron: dict[str, Any], dtype: str = "float32") -> Any:
    """The same with everything on the host before, between and after the steps."""
    backend = build(folder, megatron, dtype=dtype)
    rates, norms, weights = [], [], {}
    for _ in range(3):
        backend.offload()
        with pytest.raises(RuntimeError, match="offloaded"):
            backend.forward(parts(backend))
        backend.onload(params=True, optimizer=False)
        backend.forward(parts(backend))
        backend.onload()
        rate, norm, weights = steps(backend, 1)
        rates, norms = rates + rate, norms + norm
    return rates, norms, weights


def half_steps(folder: Path, megatron: dict[str, Any]) -> Any:
    if "param_offload" in megatron:
        return offloaded_steps(folder, megatron, "bfloat16")
    return steps(build(folder, megatron, dtype="bfloat16"), 3)


def skipped_step(folder: Path) -> tuple[float, bool, int, float, float]:
    backend = build(folder, TP2)
    before = as_numpy(backend.named_weights())

    def broken(output: TokenOutput, micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = nll(output, micro_batch)
        return loss * float("nan"), metrics

    backend.forward_backward(parts(backend), broken)
    step = backend.optim_step()
    moved = largest_difference(as_numpy(backend.named_weights()), before)
    backend.forward_backward(parts(backend), nll)
    return step.grad_norm, step.skipped, step.num_skipped, moved, backend.optim_step().grad_norm


def two_roles(folders: Folders) -> dict[str, Any]:
    """A policy that waits on the host while a reward model of the same layout runs."""
    from dovetail.backends.megatron.backend import MegatronBackend
    from dovetail.backends.megatron.optimizer import read_gradient

    policy = build(folders.policy, OFFLOAD | TP2)
    steps(policy, 1)
    policy.offload()
    assert isinstance(policy, MegatronBackend)
    stepper = policy._stepper
    assert stepper is not None
    model = policy.model
    sizes = (
        sum(p.untyped_storage().nbytes() for chunk in model.chunks for p in chunk.parameters()),
        sum(read_gradient(p).untyped_storage().nbytes() for chunk in model.chunks for p in chunk.parameters()),
        sum(t.untyped_storage().nbytes() for t in stepper.state_tensors([])),
    )
    return {"bytes": sizes, "scores": scores(folders.reward, TP2)}


def another_layout(folder: Path) -> str:
    build(folder, TP2, optim=False)
    with pytest.raises(ValueError, match="tensor_model_parallel_size") as caught:
        build(folder, {}, optim=False)
    return str(caught.value)


def too_many(folder: Path) -> str:
    with pytest.raises(ValueError, match="does not divide") as caught:
        build(folder, {"pipeline_model_parallel_size": 4})
    return str(caught.value)
