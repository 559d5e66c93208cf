"""Compile the kernels of the embedded engine in a thread of this process, while its weights are loaded.

An engine over one layer of zeros takes the first calls of a run: a few greedy prompts, then a whole batch. Kernels
that it compiled or read from Triton's cache are there when the real engine calls them. It captures no graphs, which
hold the addresses of weights, and touches no random state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from dovetail.config.fsdp import full_dtype
from dovetail.config.model import ModelConfig
from dovetail.config.rollout import RolloutConfig
from dovetail.models.load import build_meta_model, load_config, materialize
from dovetail.observability.waits import waiting
from dovetail.rollout.base import GenerationRequest, SamplingParams
from dovetail.rollout.native.engine import NativeEngine
from dovetail.rollout.request_rules import sampling_params

logger = logging.getLogger(__name__)

# Until it is measured on a GPU.
_KERNELS_BESIDE_LOADING = True
WAIT_S = 60.0
"""Longest wait for the thread. Compiling takes 4 to 8 s."""
_FEW = 4
_FEW_TOKENS = 7
_PROMPT_TOKENS = 128
_PROMPTS = 64


class WarmUp:
    """The thread, which begins at once. `wait` before the real engine's first step, or both compile side by side."""

    def __init__(self, engine: NativeEngine, calls: Sequence[Sequence[GenerationRequest]]) -> None:
        self._thread = threading.Thread(target=_run, args=(engine, calls), name="warm-up", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        with waiting("the engine's first step", "the thread that compiles its kernels", limit_s=WAIT_S) as wait:
            self._thread.join(wait.left())


def warm_up(model: ModelConfig, rollout: RolloutConfig, device: torch.device) -> WarmUp | None:
    """Begin for the engine that these sections describe; None where it has no kernels to compile, or no one layer of
    its model can be built."""
    if not _KERNELS_BESIDE_LOADING or rollout.name != "native" or device.type != "cuda":
        return None
    try:
        return WarmUp(one_layer_engine(model, rollout, device), first_calls(rollout))
    except Exception as error:  # noqa: BLE001  the real engine says what is wrong with a model
        logger.info("the engine's kernels are compiled in its first steps, not before: %s", error)
        return None


def one_layer_engine(model: ModelConfig, rollout: RolloutConfig, device: torch.device) -> NativeEngine:
    config = load_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    dtype = getattr(torch, full_dtype(rollout.dtype))
    module = build_meta_model(config, dtype=dtype, longest_row=rollout.context_length)
    materialize(module, device)
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter, dtype=dtype)
    eager = rollout.model_copy(update={"enforce_eager": True})
    return NativeEngine.from_config(eager, str(model.path), device=device, shared=module)


def first_calls(rollout: RolloutConfig) -> list[list[GenerationRequest]]:
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


def _run(engine: NativeEngine, calls: Sequence[Sequence[GenerationRequest]]) -> None:
    began = time.monotonic()
    try:
        for requests in calls:
            engine.generate(requests)
        engine.close()
        logger.info("the engine's kernels were compiled beside loading, in %.1f s", time.monotonic() - began)
    except Exception as error:  # noqa: BLE001  the boundary of the thread: the real engine compiles what is missing
        logger.info("the engine's kernels are compiled in its first steps, not before: %s", error)
