"""The training loop of one mini-batch for every sharding that runs a plain PyTorch module. Knows no RL.

What depends on how parameters are spread is asked of a ``Sharding``; what depends on the network, of ``network_call``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.backends.base import (
    PLAIN_FORWARD,
    ForwardOptions,
    LossFn,
    RankInfo,
    StepResult,
    TokenOutput,
    TrainBackend,
)
from dovetail.backends.device_memory import OffloadState, free_device_cache
from dovetail.backends.network import network_call
from dovetail.backends.schedule import NOT_TRAINABLE, LearningRateSchedule, TrainingProgress
from dovetail.backends.sharding import Sharding
from dovetail.checkpoint.sharded import CONTENTS, BackgroundSave, load_sharded, save_sharded, take_snapshot
from dovetail.models.activations import activation_offload
from dovetail.models.backbone import HF_PREFIX, TransformerBackbone
from dovetail.models.lora import adapter_disabled, has_lora, is_lora_name, merged_weights
from dovetail.models.weights import to_checkpoint_tensors
from dovetail.observability.progress import note_progress
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
        rank_info: RankInfo,
        dp_group: dist.ProcessGroup | None = None,
        sp_group: dist.ProcessGroup | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: LearningRateSchedule | None = None,
        max_grad_norm: float = 1.0,
        offload_activations: bool = False,
    ) -> None:
        super().__init__(rank_info, device)
        self._sharding = sharding
        self._call = network_call(network)
        self._hf_model = network.hf_model
        self._offloads_activations = offload_activations
        self._dp_group = dp_group
        self._sp_group = sp_group
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._progress = TrainingProgress(schedule)
        self._offloaded = OffloadState()
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

    def unsharded_model(self, dtype: torch.dtype) -> torch.nn.Module | None:
        if not self._sharding.is_unsharded or has_lora(self.module) or self._hf_model.dtype != dtype:
            return None
        return self._hf_model

    def forward_backward(
        self, micro_batches: Sequence[DataProto], loss_fn: LossFn, options: ForwardOptions = PLAIN_FORWARD
    ) -> list[dict[str, Tensor]]:
        optimizer = self._require_optimizer()
        self.check_equal_count(len(micro_batches))
        self.module.train()
        optimizer.zero_grad(set_to_none=True)
        metrics: list[dict[str, Tensor]] = []
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with nullcontext() if is_last else self._sharding.accumulating():
                on_device = self.on_device(micro_batch)
                with activation_offload() if self._offloads_activations else nullcontext():
                    loss, loss_metrics = loss_fn(self._run(micro_batch, on_device, options), on_device)
                (loss * self._sharding.reduce_factor).backward()
            metrics.append(loss_metrics)
        return metrics

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[DataProto], options: ForwardOptions = PLAIN_FORWARD) -> list[TokenOutput]:
        self.check_equal_count(len(micro_batches))
        self.module.eval()
        with nullcontext() if options.adapters else adapter_disabled(self.module):
            outputs = [self._run(part, self.on_device(part), options) for part in micro_batches]
        self._sharding.after_forward()
        return outputs

    def optim_step(self, *, advance_schedule: bool = True) -> StepResult:
        optimizer = self._require_optimizer()
        self._offloaded.require("params", "optimizer")
        # The norm is reduced over all ranks, so all of them take the same decision.
        norm = float(self._sharding.clip_grad_norm(self._max_grad_norm))
        if math.isfinite(norm):
            optimizer.step()
            self._sharding.state_changed()
        optimizer.zero_grad(set_to_none=True)
        return self._progress.stepped(norm, advance_schedule=advance_schedule)

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
        self._offloaded.mark_offloaded(params=params, optimizer=optimizer)
        if params or optimizer:
            free_device_cache(self.device)

    def onload(self, *, params: bool = True, optimizer: bool = True) -> None:
        self._move(self.device, params=params, optimizer=optimizer)
        self._offloaded.mark_onloaded(params=params, optimizer=optimizer)

    def save_state(
        self, folder: Path, *, extra: Mapping[str, Any] | None = None, contents: Collection[str] = CONTENTS
    ) -> None:
        module = self._sharding.state_module
        with self._offloaded.all_onloaded(self):
            save_sharded(folder, module, self._optimizer, extra=self._progress.pack(extra), contents=contents)

    def start_save(
        self, folder: Path, *, extra: Mapping[str, Any] | None = None, contents: Collection[str] = CONTENTS
    ) -> None:
        module = self._sharding.state_module
        with self._offloaded.all_onloaded(self):
            snapshot = take_snapshot(
                module, self._optimizer, extra=self._progress.pack(extra), contents=contents, copied=True
            )
        self._background.start(folder, snapshot)

    def is_saving(self) -> bool:
        return self._background.is_running

    def finish_save(self) -> None:
        self._background.finish()

    def load_state(self, folder: Path, *, contents: Collection[str] = CONTENTS) -> dict[str, Any]:
        with self._offloaded.all_onloaded(self):
            saved = load_sharded(folder, self._sharding.state_module, self._optimizer, contents=contents)
            self._sharding.state_changed()
        return self._progress.unpack(saved)

    def _run(self, micro_batch: DataProto, on_device: DataProto, options: ForwardOptions) -> TokenOutput:
        self._offloaded.require("params")
        note_progress()
        with ulysses_group(self._sp_group), self._sharding.compute_context():
            return self._call(self.module, micro_batch, on_device, options)

    def _require_optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise RuntimeError(NOT_TRAINABLE)
        return self._optimizer

    def _move(self, device: torch.device, *, params: bool, optimizer: bool) -> None:
        if params:
            self._sharding.move_parameters(device)
        if optimizer and self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    # Adam keeps its step count on the host unless fused; it is one number, and stays where it is.
                    if isinstance(value, Tensor) and value.dim() > 0:
                        state[name] = value.to(device)
