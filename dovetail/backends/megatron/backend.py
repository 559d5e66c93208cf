"""`MegatronBackend`: a model on Megatron-core behind the interface of every backend. Knows no RL.

All ranks of a data-parallel rank (its tensor, pipeline and context parallel ranks) are given the same rows, and all of
them return the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from dovetail.backends.base import (
    PLAIN_FORWARD,
    ForwardOptions,
    LossFn,
    StepResult,
    TokenOutput,
    TrainBackend,
)
from dovetail.backends.device_memory import OffloadState, free_device_cache
from dovetail.backends.megatron.checkpoint import load_megatron, save_megatron
from dovetail.backends.megatron.families.base import MegatronFamily
from dovetail.backends.megatron.optimizer import GradientBuffers, HostCopies, MegatronStepper, read_gradient
from dovetail.backends.megatron.outputs import empty_outputs, pipeline_item, token_output
from dovetail.backends.megatron.parts import MegatronModel
from dovetail.backends.megatron.schedule import from_last_stage, metrics_from_last_stage, run_pipeline
from dovetail.backends.megatron.shim import cuda_to_cpu
from dovetail.backends.schedule import NOT_TRAINABLE, LearningRateSchedule, TrainingProgress
from dovetail.checkpoint.sharded import CONTENTS
from dovetail.protocol import DataProto

P = ParamSpec("P")
R = TypeVar("R")


def _on_this_device(method: Callable[P, R]) -> Callable[P, R]:
    """Megatron's code believes in CUDA: see `shim`."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with cuda_to_cpu():
            return method(*args, **kwargs)

    return call


class MegatronBackend(TrainBackend):
    """One model, its optimizer and schedule. Without an optimizer it only infers (reference, reward model)."""

    def __init__(
        self,
        model: MegatronModel,
        family: MegatronFamily,
        *,
        device: torch.device,
        stepper: MegatronStepper | None = None,
        schedule: LearningRateSchedule | None = None,
        frees_gradients: bool = False,
    ) -> None:
        super().__init__(model.layout.rank_info, device)
        self.model = model
        self.layout = model.layout
        self._family = family
        self._stepper = stepper
        self._progress = TrainingProgress(schedule)
        self._host = {"params": HostCopies(), "optimizer": HostCopies()}
        self._offloaded = OffloadState()
        self._gradients: GradientBuffers | None = None
        if stepper is not None:
            self._gradients = GradientBuffers(model, frees=frees_gradients)
            self._gradients.release()
            model.config.finalize_model_grads_func = _finalize_without_normalising
            model.config.grad_scale_func = stepper.optimizer.scale_loss
            model.config.no_sync_func = [chunk.no_sync for chunk in model.wrapped]
            if len(model.wrapped) == 1:
                model.config.no_sync_func = model.wrapped[0].no_sync

    @property
    def hf_config(self) -> Any:
        return self.model.hf_config

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        return self.layout.dp_group if self.layout.dp_size > 1 else None

    def unsharded_model(self, dtype: torch.dtype) -> torch.nn.Module | None:
        return None

    @_on_this_device
    def forward_backward(
        self, micro_batches: Sequence[DataProto], loss_fn: LossFn, options: ForwardOptions = PLAIN_FORWARD
    ) -> list[dict[str, Tensor]]:
        self._require_stepper()
        self._offloaded.require("params")
        self.check_equal_count(len(micro_batches))
        assert self._gradients is not None, "a trainable backend has gradient buffers"
        self._gradients.clear()
        self._set_training(True)
        batches = [self.on_device(micro_batch) for micro_batch in micro_batches]
        items = [pipeline_item(self.model, micro_batch, options) for micro_batch in batches]

        def on_output(index: int, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return loss_fn(token_output(self.model, items[index], output, batches[index], options), batches[index])

        metrics = run_pipeline(self.model, items, on_output, forward_only=False)
        return metrics_from_last_stage(metrics, self.layout, self.device)

    @_on_this_device
    @torch.no_grad()
    def forward(self, micro_batches: Sequence[DataProto], options: ForwardOptions = PLAIN_FORWARD) -> list[TokenOutput]:
        self._offloaded.require("params")
        self.check_equal_count(len(micro_batches))
        self._set_training(False)
        batches = [self.on_device(micro_batch) for micro_batch in micro_batches]
        items = [pipeline_item(self.model, micro_batch, options) for micro_batch in batches]

        def on_output(index: int, output: Tensor) -> tuple[Tensor, TokenOutput]:
            result = token_output(self.model, items[index], output, batches[index], options)
            return output.new_zeros(()), result

        outputs = run_pipeline(self.model, items, on_output, forward_only=True)
        if not self.layout.is_last_stage:
            pairs = zip(items, batches, strict=True)
            outputs = [empty_outputs(self.model, item, micro_batch, options) for item, micro_batch in pairs]
        return self._on_all_stages(outputs)

    @_on_this_device
    def optim_step(self, *, advance_schedule: bool = True) -> StepResult:
        stepper = self._require_stepper()
        self._offloaded.require("params", "optimizer")
        norm = stepper.step()
        assert self._gradients is not None, "a trainable backend has gradient buffers"
        self._gradients.release()
        return self._progress.stepped(norm, advance_schedule=advance_schedule)

    def named_weights(self, *, merge_adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
        self._offloaded.require("params")
        return self._family.named_weights(self.model, torch.Tensor.detach)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        assert self._gradients is not None, "only a backend with an optimizer has gradients"
        self._gradients.gather()
        return self._family.named_weights(self.model, read_gradient, buffers=False)

    def offload(self, *, params: bool = True, optimizer: bool = True) -> None:
        if optimizer and self._stepper is not None:
            self._host["optimizer"].offload(self._stepper.state_tensors(self._weights()))
        if params:
            self._host["params"].offload(self._weights())
        self._offloaded.mark_offloaded(params=params, optimizer=optimizer)
        if params or optimizer:
            free_device_cache(self.device)

    def onload(self, *, params: bool = True, optimizer: bool = True) -> None:
        for name, chosen in (("params", params), ("optimizer", optimizer)):
            if chosen:
                self._host[name].onload()
        self._offloaded.mark_onloaded(params=params, optimizer=optimizer)

    @_on_this_device
    def save_state(
        self, folder: Path, *, extra: Mapping[str, Any] | None = None, contents: Collection[str] = CONTENTS
    ) -> None:
        everything = self._progress.pack(extra)
        with self._offloaded.all_onloaded(self):
            save_megatron(folder, self.model, self._optimizer(), extra=everything, contents=contents)

    @_on_this_device
    def load_state(self, folder: Path, *, contents: Collection[str] = CONTENTS) -> dict[str, Any]:
        with self._offloaded.all_onloaded(self):
            saved = load_megatron(folder, self.model, self._optimizer(), contents=contents)
        return self._progress.unpack(saved)

    def _on_all_stages(self, outputs: Sequence[TokenOutput]) -> list[TokenOutput]:
        names = [[name for name, value in vars(output).items() if value is not None] for output in outputs]
        tensors = [getattr(output, name) for output, part in zip(outputs, names, strict=True) for name in part]
        values = iter(from_last_stage(tensors, self.layout))
        return [TokenOutput(**{name: next(values) for name in part}) for part in names]

    def _set_training(self, training: bool) -> None:
        for chunk in self.model.wrapped:
            chunk.train(training)

    def on_device(self, micro_batch: DataProto) -> DataProto:
        if "multi_modal_inputs" in micro_batch.non_tensor_batch:
            raise ValueError("a model with images is not built on Megatron here; use strategy=fsdp2.")
        return super().on_device(micro_batch)

    def _weights(self) -> Iterator[Tensor]:
        for chunk in self.model.chunks:
            yield from (parameter.data for parameter in chunk.parameters())

    def _optimizer(self) -> Any:
        return None if self._stepper is None else self._stepper.optimizer

    def _require_stepper(self) -> MegatronStepper:
        if self._stepper is None:
            raise RuntimeError(NOT_TRAINABLE)
        return self._stepper


def _finalize_without_normalising(chunks: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Reduce gradients over ranks, and leave them the sums they are: the loss is a share of the mini-batch's."""
    finalize_model_grads(chunks, None, **options)
