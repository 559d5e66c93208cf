"""Whole models on real processes: Ulysses equals one process; FSDP2 loads shard by shard and computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dovetail.models.activations import enable_gradient_checkpointing
from dovetail.models.load import build_meta_model, materialize
from dovetail.models.policy import PolicyModel
from dovetail.models.value import ValueModel
from dovetail.models.weights import load_weights
from dovetail.parallel.ulysses import ulysses_group
from tests.models.tiny import image_batch, ragged_batch, run_model, save_tiny_model, tiny_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def _batch(family: str) -> dict[str, Any]:
    # 5 + 21 + 13 = 39 tokens: not a multiple of 2 or 4, so the row has a tail, and slices cut through sequences.
    return image_batch() if family == "qwen2_5_vl" else ragged_batch([5, 21, 13], total=24, side="both")


def _loss_and_grads(policy: PolicyModel, family: str) -> tuple[Any, dict[str, torch.Tensor]]:
    out = run_model(policy, **_batch(family), need_entropy=True)
    weights = torch.linspace(0.5, 2, out.log_probs.numel()).view_as(out.log_probs)
    (out.log_probs * weights + 0.3 * out.entropy).sum().backward()
    return out, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def _ulysses(rank: int, size: int, family: str, fused: bool, checkpointing: bool) -> None:
    # Heads: 4 query over 2 KV; with four ranks each KV head is shared by two of them.
    alone, alone_grads = _loss_and_grads(PolicyModel(tiny_model(family), use_fused_kernels=fused), family)
    policy = PolicyModel(tiny_model(family), use_fused_kernels=fused)
    if checkpointing:
        enable_gradient_checkpointing(policy.hf_model)
    with ulysses_group(dist.group.WORLD):
        out, grads = _loss_and_grads(policy, family)
    torch.testing.assert_close(out.log_probs, alone.log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.entropy, alone.entropy, atol=1e-5, rtol=1e-5)
    assert grads.keys() == alone_grads.keys()
    for name, want in alone_grads.items():
        dist.all_reduce(grads[name])
        torch.testing.assert_close(grads[name], want, atol=1e-5 * want.abs().max().item() + 1e-7, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("size", "family", "fused", "checkpointing"),
    [
        (2, "llama", False, False),
        (2, "qwen3", True, True),
        (2, "qwen3_moe", False, False),
        (2, "qwen2_5_vl", True, False),
        (2, "opt", False, True),
        (4, "llama_tied", True, True),
        (4, "qwen2", False, False),
        (4, "mistral_window", False, False),
    ],
)
def test_ulysses_equals_one_process_in_log_probs_entropy_and_summed_gradients(
    size: int, family: str, fused: bool, checkpointing: bool
) -> None:
    run_ranks(_ulysses, size, family, fused, checkpointing)


def _rank_without_wanted_tokens(rank: int, size: int) -> None:
    batch = ragged_batch([16], seed=3)
    wanted = torch.zeros_like(batch["input_ids"])
    wanted[:, 1:5] = 1  # all in the first rank's slice
    policy = PolicyModel(tiny_model("llama"), use_fused_kernels=True)
    with ulysses_group(dist.group.WORLD):
        run_model(policy, **batch, token_mask=wanted).log_probs.sum().backward()
    reference = PolicyModel(tiny_model("llama"))
    run_model(reference, **batch, token_mask=wanted).log_probs.sum().backward()
    for (name, p), q in zip(policy.named_parameters(), reference.parameters(), strict=True):
        dist.all_reduce(p.grad)
        torch.testing.assert_close(p.grad, q.grad, atol=1e-5 * q.grad.abs().max().item() + 1e-7, rtol=1e-4, msg=name)


def test_a_rank_whose_slice_has_no_wanted_token_still_takes_part() -> None:
    run_ranks(_rank_without_wanted_tokens, 2)


def _padded_refused(rank: int, size: int) -> None:
    policy = PolicyModel(tiny_model("llama"), use_remove_padding=False)
    with ulysses_group(dist.group.WORLD), pytest.raises(ValueError, match="use_remove_padding=True"):
        run_model(policy, **ragged_batch([4]))


def test_ulysses_refuses_the_padded_path() -> None:
    run_ranks(_padded_refused, 2)


def _fsdp2(rank: int, size: int, folder: str, family: str, role: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    wrapper: Any = PolicyModel if role == "policy" else ValueModel

    def build() -> Any:
        options = {"use_fused_kernels": True} if role == "policy" else {}
        return wrapper(build_meta_model(folder, role), **options)  # type: ignore[arg-type]

    reference = build()
    materialize(reference, "cpu")
    load_weights(reference, folder)
    sharded = build()
    mesh = init_device_mesh("cpu", (size,))
    layers = [m for m in sharded.modules() if type(m).__name__.endswith(("DecoderLayer", "VisionBlock"))]
    assert layers
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    materialize(sharded, "cpu")
    load_weights(sharded, folder)
    held = sum(p.to_local().numel() for p in sharded.parameters())
    total = sum(p.numel() for p in reference.parameters())
    assert held < 0.6 * total, "each of two ranks holds about half"
    batch = _batch(family)
    for _ in range(2):
        reference.zero_grad()
        sharded.zero_grad()
        expected, found = run_model(reference, **batch), run_model(sharded, **batch)
        if role == "policy":
            expected, found = expected.log_probs, found.log_probs
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        for out in (expected, found):
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        for (name, p), q in zip(sharded.named_parameters(), reference.parameters(), strict=True):
            if q.grad is None:  # the vision tower's unused parts
                continue
            assert isinstance(p.grad, DTensor), name
            got = p.grad.full_tensor()
            torch.testing.assert_close(got, q.grad, atol=1e-5 * q.grad.abs().max().item() + 1e-7, rtol=1e-4, msg=name)
            with torch.no_grad():
                q -= 0.01 * q.grad
                p -= 0.01 * p.grad


@pytest.mark.parametrize(
    ("family", "role"),
    [("llama_tied", "policy"), ("qwen3_moe", "policy"), ("qwen2_5_vl", "policy"), ("llama", "value")],
)
def test_fsdp2_loads_shard_by_shard_and_computes_what_one_process_does(family: str, role: str, tmp_path: Path) -> None:
    save_tiny_model(family, tmp_path)
    run_ranks(_fsdp2, 2, str(tmp_path), family, role)


def _own_unit(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    policy = PolicyModel(tiny_model("llama"), use_fused_kernels=True)
    fully_shard(policy.hf_model.lm_head)
    fully_shard(policy)
    with pytest.raises(RuntimeError, match="FSDP unit of its own"):
        run_model(policy, **ragged_batch([4]))


def test_a_head_sharded_on_its_own_is_refused() -> None:
    run_ranks(_own_unit, 2)
