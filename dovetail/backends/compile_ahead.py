"""Compile decoder layers in processes of their own while this one loads weights, starts its engine and generates.

They fill the caches that PyTorch keeps on disk, one for passes with gradients and one for those without, where the run
has such passes. When it first calls a layer, it finds the compiled kernels there and only traces; what is not there it
compiles itself. It waits for the process a few seconds at most, and one that fails costs a line in the log. Beside what
it compiled it leaves a mark: later runs with these caches start no process, and wait for none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.runtime.cache_dir_utils import cache_dir

from dovetail.backends.sharding import Precision
from dovetail.backends.single import SingleProcess
from dovetail.models.attention import PACKED_ATTENTION, no_mask, register_packed_attention
from dovetail.models.compile import compile_layers, is_uncompiled
from dovetail.models.packing import PackedSegments
from dovetail.observability.waits import waiting

logger = logging.getLogger(__name__)

Pass = Literal["grad", "no_grad"]
"""A forward with its backward, or a forward without gradients: graphs of their own."""

WAIT_S = 6.0
"""Longest wait for a process. After that this one compiles too, beside it. A wait gains about 7 s at most: what this
process then compiles itself."""
FIRST_PASS = (
    "first pass (%(name)s): layers compiled ahead: %(ahead)s, waited for %(waited_s).1f s; then %(compiler_s).1f s in "
    "the compiler: %(hits)d graphs from its cache, %(misses)d not in it, %(uncached)d that cannot be; "
    "autograd's %(autograd_hits)d from it, %(autograd_misses)d not in it"
)
"""Line of the log, whose arguments are one dict."""
_SECONDS = 300
# Kernels are tuned for this many, as if they were a micro-batch. A prime: a size that equals another is taken for it.
_TOKENS = 4099


class CompileAhead:
    """The processes of one run, one for each kind of pass; none unless they are asked for."""

    def __init__(self, job: bytes = b"", passes: Sequence[Pass] = (), mark: Path | None = None) -> None:
        """`mark`: the file that says that `job` was done before, with the kind of pass after its name."""
        self._children = {name: _Child(name, job, mark and mark.with_name(f"{mark.name}-{name}")) for name in passes}

    @contextmanager
    def around(self, name: Pass) -> Iterator[None]:
        """Every pass runs in here. The first of its kind waits for its process, at most `WAIT_S`, because this process
        would compile the same graphs once more, beside it. Afterwards it logs what was found: `FIRST_PASS`."""
        if name not in self._children or is_uncompiled():
            yield
            return
        child = self._children.pop(name)
        said = {"name": name, "waited_s": child.wait(), "ahead": child.outcome}
        before = _compiler_counts()
        yield
        logger.info(FIRST_PASS, said | {key: value - before[key] for key, value in _compiler_counts().items()})


def compile_ahead(
    hf_model: Any, precision: Precision, device: torch.device, passes: Sequence[Pass]
) -> CompileAhead | None:
    """Begin for a model on the meta device that one process will train.

    Does nothing for a model that also sees images, nor for a deterministic run: kernels are tuned for the tokens of
    the first call, so rounding would depend on who compiles first.

    A process holds one layer, its gradients and the activations of two on the device: with the CUDA context, by
    counting, 1 GiB for a 0.5B model and 2.6 GiB for 7B, until it ends.
    """
    if hf_model.base_model.get_decoder() is not hf_model.base_model or torch.are_deterministic_algorithms_enabled():
        return None
    if inductor.force_disable_caches or not inductor.fx_graph_cache:
        logger.info("layers are compiled in the first step, not before: the compiler's cache is switched off")
        return None
    settings = {"precision": precision, "device": device, "matmul": torch.get_float32_matmul_precision()}
    try:
        job = pickle.dumps(settings | {"model": hf_model.base_model})
    except Exception as error:  # noqa: BLE001  the process boundary: whatever a model of the user's own holds
        logger.info("layers are compiled in the first step, not before: %s", error)
        return None
    return CompileAhead(job, passes, Path(cache_dir()) / f"dovetail-layers-{_digest(hf_model.base_model, settings)}")


def _digest(model: Any, settings: dict[str, Any]) -> str:
    """Of what the graphs depend on. Not of the pickle, whose sets have an order of their own in every process."""
    parameters = [(name, parameter.dtype, parameter.requires_grad) for name, parameter in model.named_parameters()]
    device = torch.cuda.get_device_name(settings["device"]) if settings["device"].type == "cuda" else "cpu"
    versions = torch.__version__, transformers.__version__
    return hashlib.sha256(repr((model.config, model, parameters, settings, device, versions)).encode()).hexdigest()[:16]


class _Child:
    """A process that compiles the layers of one kind of pass, and the thread that waits for its end. None where there
    is a mark."""

    def __init__(self, name: Pass, job: bytes, mark: Path | None) -> None:
        self.outcome = "not ready"
        self._name = name
        self._mark = mark
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self._is_done = mark is not None and mark.exists()
        if self._is_done:
            self.outcome = "by an earlier run"
        else:
            self._thread.start()

    def wait(self) -> float:
        """Until it has ended, at most `WAIT_S`; returns the seconds."""
        if self._is_done:
            return 0.0
        who, what = f"the first pass ({self._name})", "the process that compiles its layers"
        with waiting(who, what, limit_s=WAIT_S) as wait:
            self._thread.join(wait.left())
            return wait.waited()

    def _run(self, job: bytes) -> None:
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "dovetail.backends.compile_ahead", self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        )
        printed = process.communicate(job)[1].decode(errors="replace").strip().splitlines()
        if process.returncode:
            self.outcome = "failed"
            why = f"status {process.returncode}, {printed[-1] if printed else 'without a word'}"
            logger.info("layers (%s) are compiled in the first step, not before: %s", self._name, why)
        else:
            seconds = time.monotonic() - began
            self.outcome = f"{seconds:.1f} s"
            logger.info("layers (%s) compiled ahead in %.0f s", self._name, seconds)
            if self._mark is not None:
                with suppress(OSError):  # then the next run compiles ahead again
                    self._mark.touch()


def _compiler_counts() -> dict[str, float]:
    """Of this process so far: seconds in the compiler, and what it found in its caches and did not."""
    from torch._dynamo.utils import calculate_time_spent, counters  # imported by now: layers are compiled

    graphs, autograd = counters["inductor"], counters["aot_autograd"]
    return {
        "compiler_s": calculate_time_spent().get("total_wall_time", 0.0),
        "hits": graphs["fxgraph_cache_hit"],
        "misses": graphs["fxgraph_cache_miss"],
        "uncached": graphs["fxgraph_cache_bypass"],
        "autograd_hits": autograd["autograd_cache_hit"],
        "autograd_misses": autograd["autograd_cache_miss"],
    }


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
