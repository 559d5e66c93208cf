"""During an update the host waits for no number of the device, so that it is always some kernels ahead.

A CPU has nothing to wait for. There the operations are refused whose result would have to come back from a device; on
CUDA PyTorch itself refuses every wait, those of copies among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.algorithms.offline.registry import preference_loss
from dovetail.algorithms.offline.sft import sft_loss
from dovetail.backends.build import build_backend
from dovetail.config.actor import ActorConfig
from dovetail.config.algorithm import RolloutCorrectionConfig
from dovetail.config.critic import CriticConfig
from dovetail.config.fsdp import FSDPConfig
from dovetail.models.activations import enable_gradient_checkpointing
from dovetail.models.packing import pack_batch
from dovetail.models.policy import PolicyModel
from dovetail.models.value import ValueModel
from dovetail.protocol import DataProto
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.critic import DataParallelPPOCritic
from dovetail.workers.micro_batches import MicroBatchLimit
from dovetail.workers.offline import IS_PADDING, OfflineLearner
from tests.backends.tiny import FP32, OPTIM
from tests.models.tiny import ragged_batch, tiny_model

PROMPT = 12
Update = Callable[[], object]

# Copies to the host are seen on CUDA alone: `tolist()` of a tensor that is on the host is no operation.
_ASKS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::item"}
_INDEXES = {"aten::index", "aten::index_put", "aten::index_put_"}


class Size(NamedTuple):
    rows: int
    micro_batch: int
    response: int


# On CUDA kernels differ with the number of tokens: that of an embedding's gradient from 3,072 on.
SIZES = {"cpu": Size(12, 4, 10), "cuda:0": Size(48, 16, 400)}


class _Refusing(TorchDispatchMode):
    """Refuses operations whose result depends on numbers that a device would have to send."""

    is_on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if self.is_on:
            by_mask = name in _INDEXES and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
            assert name not in _ASKS, f"{name} waits for the device"
            assert not by_mask, f"{name} by a mask waits for the device"
        return func(*args, **(kwargs or {}))


def rollouts(size: Size) -> DataProto:
    """Four responses to each prompt, of different lengths."""
    generator = torch.Generator().manual_seed(0)
    rows, width = size.rows, PROMPT + size.response
    ids = torch.randint(3, 290, (rows, width), generator=generator)
    ids[:, :PROMPT] = ids[::4, :PROMPT].repeat_interleave(4, 0)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row // 4 % PROMPT] = 0
        mask[row, width - 3 * row % size.response :] = 0
    numbers = {
        name: torch.randn(rows, size.response, generator=generator) for name in ("advantages", "values", "returns")
    }
    log_probs = {
        name: -5 - torch.rand(rows, size.response, generator=generator)
        for name in ("old_log_probs", "ref_log_prob", "rollout_log_probs")
    }
    columns = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:],
        "response_mask": mask[:, PROMPT:],
    }
    return DataProto.from_dict({**columns, **numbers, **log_probs}, meta_info={"temperature": 0.9})


def examples(size: Size) -> DataProto:
    """Pairs of rows, the last of which only fill up ranks."""
    batch, number = rollouts(size).tensors, torch.arange(size.rows)
    columns = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    columns["loss_mask"] = torch.nn.functional.pad(batch["response_mask"], (PROMPT, 0))
    columns[IS_PADDING] = (number >= size.rows - 2).to(torch.int8)
    columns["ref_log_prob_sum"] = torch.full((size.rows,), -50.0)
    columns["desirable"] = number // 2 % 2 == 0
    return DataProto.from_dict(columns)


def backend_of(network: Any, device: str) -> Any:
    # On CUDA in half precision, for the kernels of a run.
    fsdp = FP32 if device == "cpu" else FSDPConfig()
    return build_backend("single", network, fsdp=fsdp, optim=OPTIM, device=device)


def policy_update(
    device: str,
    *,
    fused: bool = True,
    share: bool = True,
    checkpointing: bool = False,
    correction: RolloutCorrectionConfig | None = None,
    **settings: Any,
) -> tuple[Any, Update]:
    model = tiny_model("qwen2")
    if checkpointing:
        enable_gradient_checkpointing(model)
    backend = backend_of(PolicyModel(model, use_fused_kernels=fused, share_prefixes=share), device)
    size = SIZES[device]
    config = ActorConfig(ppo_micro_batch_size_per_gpu=size.micro_batch, **settings)
    limit = MicroBatchLimit(rows=size.micro_batch)
    actor = DataParallelPPOActor(
        config, backend, mini_batch_rows=size.rows, log_prob_limit=limit, correction=correction
    )  # fmt: skip
    return backend, lambda: actor.update_policy(rollouts(size))


def critic_update(device: str) -> tuple[Any, Update]:
    backend, size = backend_of(ValueModel(tiny_model("qwen2")), device), SIZES[device]
    config = CriticConfig(ppo_micro_batch_size_per_gpu=size.micro_batch)
    critic = DataParallelPPOCritic(config, backend, mini_batch_rows=size.rows)
    return backend, lambda: critic.update_critic(rollouts(size))


def offline_update(device: str, *, method: str) -> tuple[Any, Update]:
    backend = backend_of(PolicyModel(tiny_model("qwen2"), use_fused_kernels=True), device)
    settings = {"beta": 0.1, "label_smoothing": 0.0, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    loss = sft_loss() if method == "sft" else preference_loss(method, **settings)
    size = SIZES[device]
    learner = OfflineLearner(backend, loss, MicroBatchLimit(rows=size.micro_batch // 2))
    return backend, lambda: learner.update(examples(size))


UPDATES: dict[str, tuple[Callable[..., tuple[Any, Update]], dict[str, Any]]] = {
    "prompts once, fused head": (policy_update, {}),
    "plain head": (policy_update, {"fused": False, "share": False, "entropy_coeff": 0.01}),
    "recomputed layers, KL": (policy_update, {"checkpointing": True, "use_kl_loss": True}),
    "correction": (
        policy_update,
        {
            "correction": RolloutCorrectionConfig(
                bypass_mode=True, rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold=2.0
            )
        },
    ),
    "critic": (critic_update, {}),
    "sft": (offline_update, {"method": "sft"}),
    "dpo": (offline_update, {"method": "sigmoid"}),
    "kto": (offline_update, {"method": "kto"}),
}


@contextmanager
def during_micro_batches(backend: Any, patch: pytest.MonkeyPatch, switch: Callable[[bool], None]) -> Iterator[None]:
    """`switch(True)` when a loop over micro-batches begins, `switch(False)` when it has ended."""
    loop = backend.forward_backward

    def watched(*args: Any) -> Any:
        switch(True)
        try:
            return loop(*args)
        finally:
            switch(False)

    with patch.context() as during:
        during.setattr(backend, "forward_backward", watched)
        yield


@pytest.mark.unit
@pytest.mark.parametrize("name", UPDATES)
def test_layers_loss_and_backward_ask_no_tensor_for_its_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, options = UPDATES[name]
    backend, update = build("cpu", **options)
    refusing, prepared = _Refusing(), []
    prepare = backend.module.prepare

    def switch(is_on: bool) -> None:
        refusing.is_on = is_on

    def on_the_host(*args: Any, **options: Any) -> Any:
        was_on, refusing.is_on = refusing.is_on, False
        prepared.append(prepare(*args, **options))
        refusing.is_on = was_on
        return prepared[-1]

    monkeypatch.setattr(backend.module, "prepare", on_the_host)
    with during_micro_batches(backend, monkeypatch, switch), refusing:
        update()
    assert len(prepared) >= 3


@pytest.mark.unit
def test_such_operations_are_seen() -> None:
    """So the test above can fail."""
    numbers, refusing = torch.arange(4.0, requires_grad=True), _Refusing()
    refusing.is_on = True
    asking: list[Callable[[], object]] = [
        lambda: numbers.sum().item(),
        lambda: bool(numbers.any()),
        lambda: numbers[numbers > 1],
        lambda: (numbers > 1).nonzero(),
    ]
    for ask in asking:
        with pytest.raises(AssertionError, match="waits for the device"), refusing:
            ask()


@pytest.mark.gpu
@pytest.mark.parametrize("name", UPDATES)
def test_the_host_does_not_wait_for_cuda_during_an_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, options = UPDATES[name]
    backend, update = build("cuda:0", **options)
    check_no_wait(backend, update, monkeypatch)


def check_no_wait(backend: Any, update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second update; the first compiles, and loads libraries. The error comes from where the host would wait."""
    update()
    torch.cuda.synchronize()

    def switch(is_on: bool) -> None:
        torch.cuda.set_sync_debug_mode("error" if is_on else "default")

    with during_micro_batches(backend, monkeypatch, switch):
        update()


@pytest.mark.unit
@pytest.mark.parametrize("layout", ["padded", "packed", "prompts once"])
def test_a_state_is_read_before_each_wanted_token_and_its_number_goes_to_that_token(layout: str) -> None:
    columns = rollouts(SIZES["cpu"]).tensors
    ids, mask = columns["input_ids"], columns["attention_mask"]
    wanted = torch.zeros_like(mask)
    wanted[:, PROMPT:] = 1
    policy = PolicyModel(
        tiny_model("qwen2"), use_remove_padding=layout != "padded", share_prefixes=layout == "prompts once"
    )
    batch = policy.prepare(ids, mask, columns["position_ids"], token_mask=wanted)
    rows, places = (wanted & mask).nonzero(as_tuple=True)
    assert [target.tolist() for target in batch.targets] == [rows.tolist(), places.tolist()]
    assert torch.equal(batch.labels, ids[rows, places])
    assert torch.equal(batch.input_ids.flatten()[batch.states], ids[rows, places - 1])
    assert torch.equal(batch.position_ids.flatten()[batch.states], columns["position_ids"][rows, places - 1])
    tokens = {"padded": mask.numel(), "packed": int(mask.sum())}
    tokens["prompts once"] = tokens["packed"] - sum(3 * (PROMPT - n) for n in range(3))
    assert batch.input_ids.numel() == tokens[layout]
    numbers = torch.randn(len(rows), 2)
    found = batch.spread(numbers)
    assert torch.equal(found[rows, places], numbers)
    assert torch.equal(batch.at_targets(found), numbers)
    assert found.count_nonzero() == numbers.numel()


@pytest.mark.unit
def test_what_a_model_is_called_with_is_sent_whole() -> None:
    from dovetail.models.transfer import to_device

    packed = pack_batch(**ragged_batch([3, 7, 5]), share_prefixes=True)
    sent = to_device({"packed": packed, "of a row": torch.ones(1).expand(3)}, torch.device("meta"))

    def tensors(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        for inner in vars(value).values() if hasattr(value, "__dataclass_fields__") else ():
            yield from tensors(inner)

    found = [sent["of a row"], *tensors(sent["packed"])]
    assert len(found) == 5
    assert all(tensor.is_meta for tensor in found)
    assert sent["packed"].segments.lengths == packed.segments.lengths


@pytest.mark.unit
def test_a_batch_that_is_on_a_device_is_refused() -> None:
    ids = torch.ones(2, 3, dtype=torch.long, device="meta")
    with pytest.raises(ValueError, match="input_ids is on meta; batches are packed on the host"):
        PolicyModel(tiny_model("llama")).prepare(ids, ids)
