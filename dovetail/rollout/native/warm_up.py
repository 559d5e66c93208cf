"""Compile the kernels of the embedded engine in a thread of this process, while its weights are loaded.

An engine over one layer of zeros takes the first calls of a run: a few greedy prompts, then a whole batch. Kernels
that it compiled or read from Triton's cache are there when the real engine calls them. It captures no graphs, which
hold the addresses of weights, and touches no random state. Then the trainer's head is called once, as an update does.
What time is left goes to the smaller batches that a real batch becomes, as its responses end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dovetail.config.fsdp import full_dtype
from dovetail.config.model import ModelConfig
from dovetail.config.rollout import RolloutConfig
from dovetail.models.head import fused_linear_log_prob
from dovetail.models.load import build_meta_model, load_config, materialize
from dovetail.observability.waits import waiting
from dovetail.rollout.base import GenerationRequest, SamplingParams
from dovetail.rollout.native.cuda.graphs import batch_sizes
from dovetail.rollout.native.engine import NativeEngine
from dovetail.rollout.request_rules import sampling_params

logger = logging.getLogger(__name__)

# Until they are measured on a GPU.
_KERNELS_BESIDE_LOADING = True
_HEAD_BESIDE_LOADING = True
_SMALLER_BATCHES = True
WAIT_S = 60.0
"""Longest wait for the thread. Compiling takes 4 to 8 s."""
_FEW = 4
_FEW_TOKENS = 7
_PROMPT_TOKENS = 128
_PROMPTS = 64
_HEAD_ROWS = 16


class WarmUp:
    """The thread, which begins at once. `wait` before the real engine's first step, or both compile side by side."""

    def __init__(
        self, calls: Sequence[Callable[[], object]], device: torch.device, spare: Sequence[Callable[[], object]] = ()
    ) -> None:
        """`spare`: calls that are made until somebody waits."""
        self._wanted = threading.Event()
        args = calls, spare, self._wanted, device
        self._thread = threading.Thread(target=_run, args=args, name="warm-up", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._wanted.set()
        with waiting("the engine's first step", "the thread that compiles its kernels", limit_s=WAIT_S) as wait:
            self._thread.join(wait.left())


def warm_up(model: ModelConfig, rollout: RolloutConfig, device: torch.device) -> WarmUp | None:
    """Begin for the engine that these sections describe; None where it has no kernels to compile, or no one layer of
    its model can be built."""
    if not _KERNELS_BESIDE_LOADING or rollout.name != "native" or device.type != "cuda":
        return None
    try:
        module = one_layer(model, rollout, device)
        engine = one_layer_engine(module, model, rollout)
        spare = smaller_batches(engine, rollout) if _SMALLER_BATCHES else []
        return WarmUp(first_calls(engine, module, model, rollout), device, spare)
    except Exception as error:  # noqa: BLE001  the real engine says what is wrong with a model
        logger.info("kernels are compiled in the first step, not before: %s", error)
        return None


def one_layer(model: ModelConfig, rollout: RolloutConfig, device: torch.device) -> PreTrainedModel:
    """A model of zeros."""
    config = load_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    dtype = getattr(torch, full_dtype(rollout.dtype))
    module = build_meta_model(config, dtype=dtype, longest_row=rollout.context_length)
    materialize(module, device)
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter, dtype=dtype)
    return module


def one_layer_engine(module: PreTrainedModel, model: ModelConfig, rollout: RolloutConfig) -> NativeEngine:
    eager = rollout.model_copy(update={"enforce_eager": True})
    return NativeEngine.from_config(eager, str(model.path), device=module.device, shared=module)


def first_calls(
    engine: NativeEngine, module: PreTrainedModel, model: ModelConfig, rollout: RolloutConfig
) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = [partial(engine.generate, requests) for requests in first_requests(rollout)]
    if _HEAD_BESIDE_LOADING and model.use_fused_kernels:
        head: Any = module.get_output_embeddings()
        calls.append(partial(call_head, head.weight, rollout.temperature))
    return calls


def first_requests(rollout: RolloutConfig) -> list[list[GenerationRequest]]:
    """As many rows and tokens as the comparison with the trainer has, and as the first batch. Which tokens they are
    decides no shape, only that prompts differ."""
    few = SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True)
    n = min(rollout.n, rollout.max_num_seqs)
    many = replace(sampling_params(rollout, n=n, validate=False), max_new_tokens=2, ignore_eos=True, seed=0)
    length = min(_PROMPT_TOKENS, rollout.prompt_length)
    return [
        [GenerationRequest(f"few-{row}", [row] * min(_FEW_TOKENS, length), few) for row in range(_FEW)],
        [GenerationRequest(f"many-{row}", [row % _PROMPTS] * length, many) for row in range(rollout.max_num_seqs // n)],
    ]


def smaller_batches(engine: NativeEngine, rollout: RolloutConfig) -> list[Callable[[], object]]:
    """A batch of every size that has graphs of its own, the largest first."""
    one = replace(sampling_params(rollout, n=1, validate=False), max_new_tokens=2, ignore_eos=True, seed=0)
    sizes = batch_sizes(rollout.max_num_seqs)[-2::-1]
    requests = [GenerationRequest(f"size-{size}", [0, 0], replace(one, n=size)) for size in sizes]
    return [partial(engine.generate, [request]) for request in requests]


def call_head(weight: Tensor, temperature: float) -> None:
    """Forward and backward of a few rows; how many they are decides no kernel."""
    hidden = weight.new_zeros(_HEAD_ROWS, weight.size(1), requires_grad=True)
    labels = torch.zeros(_HEAD_ROWS, dtype=torch.int64, device=weight.device)
    fused_linear_log_prob(hidden, weight.detach(), labels, temperature=temperature or 1.0).log_probs.sum().backward()


def _run(
    calls: Sequence[Callable[[], object]],
    spare: Sequence[Callable[[], object]],
    wanted: threading.Event,
    device: torch.device,
) -> None:
    began = time.monotonic()
    try:
        # Triton launches on the current device, which need not be the engine's.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for call in calls:
                call()
            seconds = time.monotonic() - began
            done = 0
            while done < len(spare) and not wanted.is_set():
                spare[done]()
                done += 1
        logger.info("kernels were compiled beside loading, in %.1f s, and of %d smaller batches", seconds, done)
    except Exception as error:  # noqa: BLE001  the boundary of the thread: what is missing is compiled when it is called
        logger.info("kernels are compiled in the first step, not before: %s", error)
