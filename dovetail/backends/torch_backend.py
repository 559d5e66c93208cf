"""The training loop of one mini-batch for every sharding that runs a plain PyTorch module. Knows no RL.

What depends on how parameters are spread is asked of a ``Sharding``; what depends on the network, of ``network_call``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.backends.base import (
    PLAIN_FORWARD,
    BackendPlace,
    ForwardOptions,
    LossFn,
    StepResult,
    TokenOutput,
    TrainBackend,
)
from dovetail.backends.device_memory import free_device_cache, memory_in_use
from dovetail.backends.network import network_call
from dovetail.backends.schedule import LearningRateSchedule
from dovetail.backends.sharding import Sharding
from dovetail.checkpoint.background import BackgroundSave
from dovetail.checkpoint.sharded import CONTENTS, load_sharded, save_sharded, take_snapshot
from dovetail.models.activations import activation_offload
from dovetail.models.backbone import HF_PREFIX, TransformerBackbone
from dovetail.models.lora import adapter_disabled, has_lora, is_lora_name, merged_weights
from dovetail.models.weights import to_checkpoint_tensors
from dovetail.parallel.ulysses import ulysses_group
from dovetail.protocol import DataProto


class TorchBackend(TrainBackend):
    """One model, its optimizer and schedule. Without an optimizer it only infers (reference, reward model)."""

    def __init__(
        self,
        sharding: Sharding,
        network: TransformerBackbone,
        *,
        device: torch.device,
        place: BackendPlace,
        dp_group: dist.ProcessGroup | None = None,
        sp_group: dist.ProcessGroup | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: LearningRateSchedule | None = None,
        max_grad_norm: float = 1.0,
        offload_activations: bool = False,
    ) -> None:
        super().__init__(place, device)
        self._sharding = sharding
        self._call = network_call(network)
        self._hf_model = network.hf_model
        self._offloads_activations = offload_activations
        self._dp_group = dp_group
        self._sp_group = sp_group
        self._optimizer = optimizer
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._num_skipped = 0
        self._away: set[str] = set()
        self._background = BackgroundSave()

    @property
    def module(self) -> torch.nn.Module:
        """The network as this process holds it, sharded or not."""
        return self._sharding.module

    @property
    def hf_config(self) -> Any:
        return self._hf_model.config

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        return self._dp_group

    def whole_model(self, dtype: torch.dtype) -> torch.nn.Module | None:
        if not self._sharding.is_whole or has_lora(self.module) or self._hf_model.dtype != dtype:
            return None
        return self._hf_model

    def forward_backward(
        self, micro_batches: Sequence[DataProto], loss_fn: LossFn, options: ForwardOptions = PLAIN_FORWARD
    ) -> list[dict[str, Tensor]]:
        optimizer, _ = self._trainable()
        self.check_equal_count(len(micro_batches))
        self.module.train()
        optimizer.zero_grad(set_to_none=True)
        metrics: list[dict[str, Tensor]] = []
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with nullcontext() if is_last else self._sharding.accumulating():
                micro_batch = self._here(micro_batch)
                with activation_offload() if self._offloads_activations else nullcontext():
                    loss, found = loss_fn(self._run(micro_batch, options), micro_batch)
                (loss * self._sharding.reduce_factor).backward()
            metrics.append(found)
        return metrics

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[DataProto], options: ForwardOptions = PLAIN_FORWARD) -> list[TokenOutput]:
        self.check_equal_count(len(micro_batches))
        self.module.eval()
        with nullcontext() if options.adapters else adapter_disabled(self.module):
            outputs = [self._run(self._here(micro_batch), options) for micro_batch in micro_batches]
        self._sharding.after_forward()
        return outputs

    def optim_step(self, *, advance_schedule: bool = True) -> StepResult:
        optimizer, schedule = self._trainable()
        self._require_here("params", "optimizer")
        lr = schedule.lr
        # The norm is reduced over all ranks, so all of them take the same decision.
        norm = float(self._sharding.clip_grad_norm(self._max_grad_norm))
        skipped = not math.isfinite(norm)
        if skipped:
            self._num_skipped += 1
        else:
            optimizer.step()
            self._sharding.state_changed()
            if advance_schedule:
                schedule.step()
        optimizer.zero_grad(set_to_none=True)
        return StepResult(grad_norm=norm, skipped=skipped, lr=lr, num_skipped=self._num_skipped)

    def named_weights(self, *, merge_adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
        tensors = self._sharding.full_tensors()
        adapted = has_lora(self.module)
        if adapted and merge_adapters:
            tensors = merged_weights(self.module, tensors)
        named = ((self._sharding.plain_name(name).removeprefix(HF_PREFIX), tensor) for name, tensor in tensors)
        named = itertools.chain(named, self._saved_buffers())
        # Adapters have no name on disk; with them, names in memory are all there is.
        return named if adapted and not merge_adapters else to_checkpoint_tensors(self._hf_model, named)

    def named_adapters(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._sharding.full_tensors(wanted=is_lora_name):
            yield self._sharding.plain_name(name).removeprefix(HF_PREFIX), tensor

    def _saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint holds beside parameters, such as the bias of a sigmoid router. Whole on every rank."""
        for prefix, module in self._hf_model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    full_name = f"{prefix}.{name}" if prefix else name
                    yield self._sharding.plain_name(full_name), buffer

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._sharding.full_tensors(gradients=True):
            yield self._sharding.plain_name(name).removeprefix(HF_PREFIX), tensor

    def offload(self, *, params: bool = True, optimizer: bool = True) -> None:
        self._move(torch.device("cpu"), params=params, optimizer=optimizer)
        self._away |= {name for name, chosen in (("params", params), ("optimizer", optimizer)) if chosen}
        free_device_cache(self.device)

    def onload(self, *, params: bool = True, optimizer: bool = True) -> None:
        self._move(self.device, params=params, optimizer=optimizer)
        self._away -= {name for name, chosen in (("params", params), ("optimizer", optimizer)) if chosen}

    def save_state(
        self, folder: Path, *, extra: Mapping[str, Any] | None = None, contents: Collection[str] = CONTENTS
    ) -> None:
        module = self._sharding.state_module
        with self._brought_in():
            save_sharded(folder, module, self._optimizer, extra=self._with_own_state(extra), contents=contents)

    def start_save(
        self, folder: Path, *, extra: Mapping[str, Any] | None = None, contents: Collection[str] = CONTENTS
    ) -> None:
        module = self._sharding.state_module
        with self._brought_in():
            snapshot = take_snapshot(
                module, self._optimizer, extra=self._with_own_state(extra), contents=contents, copied=True
            )
        self._background.start(folder, snapshot)

    def is_saving(self) -> bool:
        return self._background.is_running

    def finish_save(self) -> None:
        self._background.finish()

    def load_state(self, folder: Path, *, contents: Collection[str] = CONTENTS) -> dict[str, Any]:
        with self._brought_in():
            saved = load_sharded(folder, self._sharding.state_module, self._optimizer, contents=contents)
            self._sharding.state_changed()
        if saved is None:
            return {}
        own = saved["backend"]
        if self._schedule is not None and own["schedule"] is not None:
            self._schedule.load_state_dict(own["schedule"])
        self._num_skipped = own["num_skipped"]
        return saved["extra"]

    def memory(self) -> dict[str, float]:
        return memory_in_use(self.device)

    def sum_over_dp(self, counts: Tensor) -> Tensor:
        counts = counts.to(self.device)
        if self._dp_group is not None:
            counts = counts.clone()
            dist.all_reduce(counts, group=self._dp_group)
        return counts

    def _with_own_state(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        own = {
            "schedule": self._schedule.state_dict() if self._schedule is not None else None,
            "num_skipped": self._num_skipped,
        }
        return {"backend": own, "extra": dict(extra or {})}

    def _run(self, micro_batch: DataProto, options: ForwardOptions) -> TokenOutput:
        self._require_here("params")
        with ulysses_group(self._sp_group), self._sharding.compute_context():
            return self._call(self.module, micro_batch, options)

    def _here(self, micro_batch: DataProto) -> DataProto:
        """The micro-batch on this device. The caller's own stays where it is: all of them at once may not fit."""
        if micro_batch.batch is None:
            return micro_batch
        return DataProto(micro_batch.batch.to(self.device), micro_batch.non_tensor_batch, micro_batch.meta_info)

    def _require_here(self, *names: str) -> None:
        # Checked on the CPU too, where nothing moves: a laptop run then finds the missing call before a cluster does.
        away = sorted(self._away.intersection(names))
        if away:
            raise RuntimeError(f"{' and '.join(away)} are offloaded; call onload() first")

    @contextmanager
    def _brought_in(self) -> Iterator[None]:
        away = set(self._away)
        self.onload(params="params" in away, optimizer="optimizer" in away)
        try:
            yield
        finally:
            if away:
                self.offload(params="params" in away, optimizer="optimizer" in away)

    def _trainable(self) -> tuple[torch.optim.Optimizer, LearningRateSchedule]:
        if self._optimizer is None or self._schedule is None:
            raise RuntimeError("this backend was built without an optimizer; pass optim to build_backend to train it")
        return self._optimizer, self._schedule

    def _move(self, device: torch.device, *, params: bool, optimizer: bool) -> None:
        if params:
            self._sharding.move_parameters(device)
        if optimizer and self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    # Adam keeps its step count on the host unless fused; it is one number, and stays where it is.
                    if isinstance(value, Tensor) and value.dim() > 0:
                        state[name] = value.to(device)
