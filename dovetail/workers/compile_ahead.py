"""Compile decoder layers in processes of their own while this one loads weights, starts its engine and generates.

They fill the caches that PyTorch keeps on disk, one for passes with gradients and one for those without, where the run
has such passes. When it first calls a layer, it finds the compiled kernels there and only traces; what is not there yet
it compiles itself.
So nothing waits for these processes, and one that fails costs a line in the log.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from dovetail.backends.sharding import Precision
from dovetail.backends.single import SingleProcess
from dovetail.models.attention import PACKED_ATTENTION, no_mask, register_packed_attention
from dovetail.models.compile import compile_layers
from dovetail.models.packing import PackedSegments

logger = logging.getLogger(__name__)

Pass = Literal["grad", "no_grad"]
"""A forward with its backward, or a forward without gradients: graphs of their own."""

_SECONDS = 300
# Kernels are tuned for this many, as if they were a micro-batch. A prime: a size that equals another is taken for it.
_TOKENS = 4099


def compile_ahead(
    hf_model: Any, precision: Precision, device: torch.device, passes: Sequence[Pass]
) -> list[threading.Thread]:
    """Begin for a model on the meta device that one process will train; the threads end with their processes.

    Does nothing for a model that also sees images, nor for a deterministic run: kernels are tuned for the tokens of
    the first call, so rounding would depend on who compiles first.

    A process holds one layer, its gradients and the activations of two on the device: with the CUDA context, by
    counting, 1 GiB for a 0.5B model and 2.6 GiB for 7B, until it ends.
    """
    if hf_model.base_model.get_decoder() is not hf_model.base_model or torch.are_deterministic_algorithms_enabled():
        return []
    settings = {"precision": precision, "device": device, "matmul": torch.get_float32_matmul_precision()}
    try:
        job = pickle.dumps(settings | {"model": hf_model.base_model})
    except Exception as error:  # noqa: BLE001  the process boundary: whatever a model of the user's own holds
        logger.info("layers are compiled in the first step, not before: %s", error)
        return []
    threads = [threading.Thread(target=_run, args=(name, job), daemon=True) for name in passes]
    for thread in threads:
        thread.start()
    return threads


def _run(name: str, job: bytes) -> None:
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "dovetail.workers.compile_ahead", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )
    printed = process.communicate(job)[1].decode(errors="replace").strip().splitlines()
    if process.returncode:
        why = f"status {process.returncode}, {printed[-1] if printed else 'without a word'}"
        logger.info("layers (%s) are compiled in the first step, not before: %s", name, why)
    else:
        logger.info("layers (%s) compiled ahead in %.0f s", name, time.monotonic() - began)


def main() -> None:
    signal.alarm(_SECONDS)  # nobody handles it: the process ends
    os.nice(5)
    job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_float32_matmul_precision(job["matmul"])
    run_two_layers(job["model"], job["precision"], job["device"], trains=sys.argv[1] == "grad")


def run_two_layers(model: Any, precision: Precision, device: torch.device, *, trains: bool) -> None:
    """Call layers as `TorchBackend` on a `SingleProcess` does."""
    register_packed_attention()
    model.set_attn_implementation(PACKED_ATTENTION)
    if all(parameter.requires_grad for parameter in model.parameters()):
        precision = Precision(precision.compute, precision.compute, precision.compute)  # masters are not needed
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.master)
    needs_grad = trains and model.get_input_embeddings().weight.requires_grad
    model.set_input_embeddings(nn.Identity())
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        if type(layers[0]).__name__ in model._no_split_modules:
            del layers[1:]
            layers.append(layers[0])  # its input has a gradient, that of the first may have none
    compile_layers(model)
    sharding = SingleProcess(model, precision, device)
    model.train(trains)
    positions = torch.arange(_TOKENS, device=device)[None]
    offsets = torch.tensor([0, _TOKENS], dtype=torch.int32, device=device)
    with torch.set_grad_enabled(trains), sharding.compute_context():
        leaf = torch.zeros(1, _TOKENS, model.config.hidden_size, dtype=precision.master, device=device)
        hidden = model(
            inputs_embeds=leaf.requires_grad_(needs_grad) + 0,
            attention_mask=no_mask().to(device),
            position_ids=positions,
            segments=PackedSegments((_TOKENS,), offsets),
            use_cache=False,
        ).last_hidden_state
    if trains:
        hidden.sum().backward()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
