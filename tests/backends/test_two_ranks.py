"""What two processes must agree on: skipped steps, refusals, loading, adapters, value heads, memory moves, export.

Tolerance 1e-5 in fp32, for the reason given in ``test_parity``.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dovetail.backends.base import ForwardOptions, TokenOutput
from dovetail.backends.build import build_backend
from dovetail.backends.export import export_hf_folder
from dovetail.backends.fsdp2 import fsdp2_clip_grad_norm_
from dovetail.backends.torch_backend import TorchBackend
from dovetail.config.fsdp import FSDPConfig
from dovetail.models.backbone import TransformerBackbone
from dovetail.models.fp8 import use_fp8_projections
from dovetail.models.load import build_meta_model
from dovetail.models.lora import add_lora
from dovetail.models.policy import PolicyModel
from dovetail.models.value import ValueModel
from dovetail.protocol import DataProto
from dovetail.weight_sync import LoraAdapter, write_peft_folder
from tests.backends.tiny import (
    FP32,
    OPTIM,
    as_numpy,
    cut,
    largest_difference,
    my_rows,
    tiny_batch,
    tiny_policy,
    total_weight,
    weighted_nll,
)
from tests.ranks import run_alone, run_ranks

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5
SHARDED = ("fsdp2", "fsdp")
Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("model")
    export_hf_folder(make("single", tiny_policy()), path / "hf")
    return path


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("ranks")
    run_alone(save_policy, folder)
    return run_ranks(everything, 2, folder)


@pytest.fixture(scope="module")
def alone() -> Found:
    return run_alone(train_alone)


def save_policy(rank: int, world_size: int, folder: Path) -> None:
    export_hf_folder(make("single", tiny_policy()), folder / "hf")
    save_adapter(folder / "adapter")


def save_adapter(folder: Path) -> None:
    """One that has learned something."""
    torch.manual_seed(5)
    shapes = ((name, tensor) for name, tensor in tiny_policy(lora=True).hf_model.named_parameters() if ".lora_" in name)
    named = ((name.replace(".default.", "."), torch.randn(tensor.shape) * 0.1) for name, tensor in shapes)
    write_peft_folder(LoraAdapter(4, 8.0, named), folder)


def train_alone(rank: int, world_size: int) -> Found:
    return {name: train(make("single", network())) for name, network in NETWORKS.items()}


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(strategy: str, ranks: list[Found]) -> None:
    for rank in ranks:
        skipped, before, after = rank[strategy]["bad gradient"]
        assert skipped
        assert largest_difference(before, after) == 0.0


@pytest.mark.parametrize("strategy", SHARDED)
def test_unequal_numbers_of_micro_batches_are_an_error_on_all_ranks_not_a_hang(
    strategy: str, ranks: list[Found]
) -> None:
    for rank in ranks:
        assert "other ranks from 1 to 2" in rank[strategy]["unequal"]


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_meta_network_is_filled_shard_by_shard(strategy: str, ranks: list[Found], folder: Path) -> None:
    source = make("single", tiny_policy())
    log_probs = source.forward([tiny_batch()])[0].log_probs
    assert log_probs is not None
    for rank in ranks:
        weights, found, num_held = rank[strategy]["from meta"]
        assert num_held < 0.6 * sum(weight.size for weight in weights.values())
        assert largest_difference(weights, as_numpy(source.named_weights())) == 0.0
        np.testing.assert_allclose(found, log_probs.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("name", ["untied embeddings", "lora", "value head", "fp8"])
def test_other_networks_train_as_in_one_process(name: str, strategy: str, ranks: list[Found], alone: Found) -> None:
    for rank in ranks:
        for found, expected in zip(rank[strategy][name], alone[name], strict=True):
            assert largest_difference(found, expected) < TOLERANCE


@pytest.mark.parametrize("strategy", SHARDED)
def test_an_actor_without_its_adapter_is_the_model_it_started_from(strategy: str, ranks: list[Found]) -> None:
    start = make("single", tiny_policy()).forward([tiny_batch()])[0].log_probs
    assert start is not None
    for rank in ranks:
        off, on = rank[strategy]["reference"]
        np.testing.assert_allclose(off, start.numpy(), atol=TOLERANCE)
        assert np.abs(on - start.numpy()).max() > 1e-3


@pytest.mark.parametrize("strategy", SHARDED)
def test_offload_and_onload_change_nothing(strategy: str, ranks: list[Found]) -> None:
    for rank in ranks:
        moved, kept = rank[strategy]["offload"]
        assert largest_difference(moved, kept) == 0.0


@pytest.mark.parametrize("strategy", SHARDED)
def test_onload_brings_parameters_and_moments_to_the_device_each_when_asked(strategy: str, ranks: list[Found]) -> None:
    for rank in ranks:
        assert rank[strategy]["devices"] == [{"meta"}, {"cpu"}, {"meta"}, {"meta"}]


@pytest.mark.parametrize("strategy", SHARDED)
def test_bfloat16_is_near_and_its_weights_stay_float32(strategy: str, ranks: list[Found]) -> None:
    exact = make("single", tiny_policy()).forward([tiny_batch()])[0].log_probs
    assert exact is not None
    for rank in ranks:
        found, dtypes = rank[strategy]["bfloat16"]
        # 8 bits of mantissa on values around 4.
        assert 1e-5 < np.abs(found - exact.numpy()).max() < 0.2
        assert dtypes == {"float32"}


def test_fsdp1_adds_micro_batches_of_bfloat16_up_in_float32_as_fsdp2_does(ranks: list[Found]) -> None:
    for rank in ranks:
        found, expected = (rank[strategy]["sum of micro-batches"] for strategy in ("fsdp", "fsdp2"))
        # Gradients are below 1. Added up in bfloat16 they are off by 4e-3.
        assert largest_difference(found, expected) < 1e-6


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_full_disk_during_export_is_an_error_on_all_ranks(strategy: str, ranks: list[Found]) -> None:
    for rank in ranks:
        assert "rank 0 could not write" in rank[strategy]["full disk"]
        assert "No space left" in rank[strategy]["full disk"]


def test_a_meta_network_with_adapters_starts_equal_on_all_ranks(ranks: list[Found]) -> None:
    source = as_numpy(make("single", tiny_policy()).named_weights())
    for rank in ranks:
        merged, adapters = rank["fsdp2"]["adapters from meta"]
        assert largest_difference(merged, source) < TOLERANCE  # B is zero, so the merged weights are the folder's
        assert largest_difference(adapters, ranks[0]["fsdp2"]["adapters from meta"][1]) == 0.0
        assert any(np.abs(value).max() > 0 for name, value in adapters.items() if ".lora_A." in name)


@pytest.mark.parametrize("strategy", SHARDED)
def test_an_adapter_is_continued_as_in_one_process(
    strategy: str, ranks: list[Found], folder: Path, tmp_path: Path
) -> None:
    save_adapter(tmp_path)
    first, *expected = continued("single", folder / "hf", tmp_path)
    assert largest_difference(first, as_numpy(make("single", tiny_policy()).named_weights())) > 1e-2
    for rank in ranks:
        for found, wanted in zip(rank[strategy]["continued"], (first, *expected), strict=True):
            assert largest_difference(found, wanted) < TOLERANCE


def test_the_clip_returns_the_norm_of_the_whole_model(ranks: list[Found]) -> None:
    for rank in ranks:
        two, largest, message, whole = rank["fsdp2"]["norms"]
        assert two == pytest.approx(np.sqrt(sum((value**2).sum() for value in whole.values())), rel=1e-5)
        assert largest == pytest.approx(max(np.abs(value).max() for value in whole.values()), rel=1e-6)
        assert "gradient norm is nan" in message


def test_global_counts_are_sums_over_data_parallel_ranks(ranks: list[Found]) -> None:
    for rank in ranks:
        assert rank["fsdp2"]["counts"] == [3, 20]


# ---- what runs on every rank ----


def value_network() -> ValueModel:
    from transformers import LlamaForTokenClassification

    torch.manual_seed(0)
    config = tiny_policy().hf_model.config
    config.num_labels = 1
    return ValueModel(LlamaForTokenClassification(config))


def fp8_network() -> PolicyModel:
    network = tiny_policy(remove_padding=True, checkpointing=True)
    # The other recipe also quantises by the tokens of a micro-batch, which are not those of one process.
    use_fp8_projections(network.hf_model, "rowwise_with_gw_hp", torch.device("cpu"))
    return network


NETWORKS: dict[str, Callable[[], TransformerBackbone]] = {
    "fp8": fp8_network,
    "untied embeddings": lambda: tiny_policy(tied=False),
    "lora": lambda: tiny_policy(lora=True, remove_padding=True),
    "value head": value_network,
}


def make(strategy: str, network: TransformerBackbone, fsdp: FSDPConfig = FP32, **options: Any) -> TorchBackend:
    return build_backend(strategy, network, fsdp=fsdp, optim=OPTIM, **options)


def squared_values(output: TokenOutput, micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
    assert output.values is not None
    return ((output.values - 1) ** 2 * micro_batch.tensors["weights"]).sum() / 30, {}


def train(backend: TorchBackend) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    batch = tiny_batch()
    rows = my_rows(batch, backend.rank_info)
    is_policy = backend.forward([rows])[0].values is None
    loss_fn = weighted_nll(total_weight(batch)) if is_policy else squared_values
    gradients: dict[str, np.ndarray] = {}
    for _ in range(2):
        backend.forward_backward(cut(rows, (1, len(rows) - 1)), loss_fn)
        gradients = as_numpy(backend.named_gradients())
        backend.optim_step()
    return gradients, as_numpy(backend.named_weights())


def everything(rank: int, world_size: int, folder: Path) -> Found:
    return {strategy: on_strategy(strategy, rank, folder) for strategy in SHARDED}


def on_strategy(strategy: str, rank: int, folder: Path) -> Found:
    found: Found = {name: train(make(strategy, network())) for name, network in NETWORKS.items()}
    found["bad gradient"] = bad_gradient(make(strategy, tiny_policy()), rank)
    found["unequal"] = unequal(make(strategy, tiny_policy()), rank)
    found["from meta"] = from_meta(strategy, folder / "hf")
    found["reference"] = reference(make(strategy, tiny_policy(lora=True)))
    found["offload"] = tuple(offloaded(make(strategy, tiny_policy()), moves) for moves in (True, False))
    found["devices"] = devices_of_moved_state(strategy)
    found["bfloat16"] = bfloat16(strategy)
    found["sum of micro-batches"] = sum_of_micro_batches(strategy)
    found["full disk"] = full_disk(make(strategy, tiny_policy()), folder / f"export-{strategy}")
    found["continued"] = continued(strategy, folder / "hf", folder / "adapter")
    if strategy == "fsdp2":
        found["adapters from meta"] = adapters_from_meta(folder / "hf")
        found["norms"] = norms(make(strategy, tiny_policy()))
    backend = make(strategy, tiny_policy())
    found["counts"] = backend.sum_over_dp(torch.tensor([1 + rank, 10])).tolist()
    return found


def bad_gradient(backend: TorchBackend, rank: int) -> tuple[bool, dict[str, np.ndarray], dict[str, np.ndarray]]:
    batch = tiny_batch()
    train(backend)
    before = as_numpy(backend.named_weights())

    def loss_fn(output: TokenOutput, micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        assert output.log_probs is not None
        return output.log_probs.sum() * (float("nan") if rank == 1 else 1.0), {}

    backend.forward_backward(cut(my_rows(batch, backend.rank_info), (2, 2)), loss_fn)
    skipped = backend.optim_step().skipped
    return skipped, before, as_numpy(backend.named_weights())


def unequal(backend: TorchBackend, rank: int) -> str:
    with pytest.raises(ValueError, match="micro-batches") as caught:
        backend.forward(cut(my_rows(tiny_batch(), backend.rank_info), (4,) if rank == 0 else (2, 2)))
    return str(caught.value)


def from_meta(strategy: str, folder: Path) -> tuple[dict[str, np.ndarray], np.ndarray, int]:
    network = PolicyModel(build_meta_model(folder), use_remove_padding=True)
    backend = make(strategy, network, weights=folder)
    log_probs = backend.forward([tiny_batch()])[0].log_probs
    assert log_probs is not None
    parameters = [p.to_local() if isinstance(p, DTensor) else p for p in backend.module.parameters()]
    return as_numpy(backend.named_weights()), log_probs.numpy(), sum(p.numel() for p in parameters)


def adapters_from_meta(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    model = add_lora(build_meta_model(folder), rank=4, alpha=8.0)
    backend = make("fsdp2", PolicyModel(model), weights=folder)
    raw = as_numpy(backend.named_weights(merge_adapters=False))
    return as_numpy(backend.named_weights()), {name: value for name, value in raw.items() if ".lora_" in name}


def continued(strategy: str, folder: Path, adapter: Path) -> tuple[dict[str, np.ndarray], ...]:
    """Merged weights before any update, then gradients and weights after some."""
    network = PolicyModel(add_lora(build_meta_model(folder), rank=4, alpha=8.0))
    backend = make(strategy, network, weights=folder, adapter=adapter)
    return as_numpy(backend.named_weights()), *train(backend)


def norms(backend: TorchBackend) -> tuple[float, float, str, dict[str, np.ndarray]]:
    batch = tiny_batch()
    backend.forward_backward([my_rows(batch, backend.rank_info)], weighted_nll(total_weight(batch)))
    whole = as_numpy(backend.named_gradients())
    parameters = list(backend.module.parameters())
    two = float(fsdp2_clip_grad_norm_(parameters, 1e9))
    largest = float(fsdp2_clip_grad_norm_(parameters, 1e9, float("inf")))
    fsdp2_clip_grad_norm_(parameters, float("nan"))
    with pytest.raises(RuntimeError, match="gradient norm") as caught:
        fsdp2_clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    return two, largest, str(caught.value), whole


def reference(backend: TorchBackend) -> tuple[np.ndarray, np.ndarray]:
    train(backend)
    off = backend.forward([tiny_batch()], ForwardOptions(adapters=False))[0].log_probs
    train(backend)  # the adapter is on and trainable again
    on = backend.forward([tiny_batch()])[0].log_probs
    assert off is not None
    assert on is not None
    return off.numpy(), on.numpy()


def offloaded(backend: TorchBackend, moves: bool) -> dict[str, np.ndarray]:
    train(backend)
    if moves:
        backend.offload()
        backend.onload()
    return train(backend)[1]


def devices_of_moved_state(strategy: str) -> list[set[str]]:
    """Where parameters and moments are after each move. The device is `meta`, which is not the host anywhere.

    FSDP1's flat parameters cannot go there: that they were on their way is an error.
    """
    backend = make(strategy, tiny_policy())
    train(backend)
    backend.device = torch.device("meta")
    backend.offload()
    assert backend._optimizer is not None
    if strategy == "fsdp":
        with pytest.raises(RuntimeError, match="set_data"):
            backend.onload(optimizer=False)
        return [{"meta"}, {"cpu"}, {"meta"}, {"meta"}]
    seen = []
    for kept in ({"optimizer": False}, {"params": False}):
        backend.onload(**kept)
        moments = [v for state in backend._optimizer.state.values() for v in state.values() if v.dim() > 0]
        seen += [{_local(p).device.type for p in backend.module.parameters()}, {_local(m).device.type for m in moments}]
    return seen


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bfloat16(strategy: str) -> tuple[np.ndarray, set[str]]:
    backend = make(strategy, tiny_policy(remove_padding=True), FSDPConfig())
    log_probs = backend.forward([tiny_batch()])[0].log_probs
    _, weights = train(backend)
    assert log_probs is not None
    return log_probs.numpy(), {str(weight.dtype) for weight in weights.values()}


def sum_of_micro_batches(strategy: str) -> dict[str, np.ndarray]:
    backend = make(strategy, tiny_policy(), FSDPConfig())
    batch = tiny_batch(rows=32)
    backend.forward_backward(cut(my_rows(batch, backend.rank_info), (1,) * 16), weighted_nll(total_weight(batch)))
    return as_numpy(backend.named_gradients())


def full_disk(backend: TorchBackend, out: Path) -> str:
    class FullDisk:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="could not write") as caught:
        export_hf_folder(backend, out, tokenizer=FullDisk())
    assert not out.exists()
    return str(caught.value)
