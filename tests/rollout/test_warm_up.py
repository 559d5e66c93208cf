"""The engine's kernels are compiled beside loading: which calls that takes, and that nothing else notices."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config.model import ModelConfig
from dovetail.config.rollout import RolloutConfig
from dovetail.rollout.native import warm_up
from dovetail.rollout.native.cuda.graphs import DecodeSteps
from dovetail.rollout.native.cuda.paged_step import PagedPrefill
from dovetail.rollout.native.engine import NativeEngine
from tests.models.tiny import save_tiny_model
from tests.rollout import plain_ops

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")


class PagesOnCPU(NativeEngine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, ops=plain_ops, **options)


def sections(folder: Path, **rollout: Any) -> tuple[ModelConfig, RolloutConfig]:
    given = {"max_num_seqs": 24, "n": 4, "prompt_length": 16, "response_length": 8, "dtype": "float32", **rollout}
    return ModelConfig(path=str(folder), use_fused_kernels=True), RolloutConfig(name="native", **given)


def begun(module: Any, model: ModelConfig, rollout: RolloutConfig) -> warm_up.WarmUp:
    engine = warm_up.one_layer_engine(module, model, rollout)
    return warm_up.WarmUp(warm_up.first_calls(engine, module, model, rollout), CPU)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_the_steps_of_a_runs_first_calls_are_taken_on_one_layer(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, filled, heads = [], [], []
    head = warm_up.fused_linear_log_prob
    monkeypatch.setattr(
        warm_up,
        "fused_linear_log_prob",
        lambda hidden, *rest, **options: (heads.append(hidden.shape), head(hidden, *rest, **options))[1],
    )
    run, begin = DecodeSteps.run, PagedPrefill.__init__
    monkeypatch.setattr(warm_up, "NativeEngine", PagesOnCPU)
    monkeypatch.setattr(
        DecodeSteps, "run", lambda self, size, **how: (decoded.append((size, how)), run(self, size, **how))
    )
    monkeypatch.setattr(
        PagedPrefill, "__init__", lambda self, *of: (begin(self, *of), filled.append(len(self.tokens)))[0]
    )
    model, rollout = sections(save_tiny_model(family, tmp_path, tokenizer=False), top_p=0.9)
    module = warm_up.one_layer(model, rollout, CPU)
    assert len(module.base_model.layers) == 1
    state = torch.random.get_rng_state()
    begun(module, model, rollout).wait()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert dict.fromkeys(size for size, _ in decoded) == dict.fromkeys([4, 24])
    assert next(how for size, how in decoded if size == 24) == {"filters": True, "raw": False}
    assert filled == [4 * 6, 6 * 15]  # but for the last token of each prompt
    assert heads == [(16, 128)]


def test_time_that_is_left_goes_to_smaller_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "NativeEngine", PagesOnCPU)
    model, rollout = sections(save_tiny_model("qwen2", tmp_path, tokenizer=False))
    engine = warm_up.one_layer_engine(warm_up.one_layer(model, rollout, CPU), model, rollout)
    sizes: list[int] = []
    run, ready, reached = DecodeSteps.run, threading.Event(), threading.Event()

    def noted(self: DecodeSteps, size: int, **how: Any) -> None:
        assert ready.wait(20)
        sizes.append(size)
        run(self, size, **how)
        if size == 4:
            reached.set()
            assert warming._wanted.wait(20)

    monkeypatch.setattr(DecodeSteps, "run", noted)
    warming = warm_up.WarmUp([], CPU, warm_up.smaller_batches(engine, rollout))
    ready.set()
    assert reached.wait(20)
    warming.wait()
    assert list(dict.fromkeys(sizes)) == [16, 8, 4], "the largest first, and no more once somebody waits"


def test_its_memory_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "NativeEngine", PagesOnCPU)
    model, rollout = sections(save_tiny_model("qwen2", tmp_path, tokenizer=False))
    module = warm_up.one_layer(model, rollout, CPU)
    weight = weakref.ref(module.get_input_embeddings().weight)
    gc.disable()
    try:
        warming = begun(module, model, rollout)
        del module
        warming.wait()
        assert weight() is None
    finally:
        gc.enable()


def test_a_failure_costs_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(warm_up, "NativeEngine", PagesOnCPU)
    model, rollout = sections(save_tiny_model("qwen2", tmp_path, tokenizer=False))
    module = warm_up.one_layer(model, rollout, CPU)
    monkeypatch.setattr(DecodeSteps, "run", fail)
    begun(module, model, rollout).wait()
    assert "not before: no memory" in caplog.text
    caplog.clear()
    assert warm_up.warm_up(ModelConfig(path=str(tmp_path / "nothing")), rollout, torch.device("cuda")) is None
    assert "has no config.json" in caplog.text


def test_there_is_nothing_to_compile_on_a_cpu_or_for_another_engine(tmp_path: Path) -> None:
    model, rollout = sections(tmp_path)
    assert warm_up.warm_up(model, rollout, CPU) is None
    assert warm_up.warm_up(model, rollout.model_copy(update={"name": "vllm"}), torch.device("cuda")) is None


FIRST_CALLS = """
import json, os, pathlib, random, sys
import torch
from dovetail.config.model import ModelConfig
from dovetail.config.rollout import RolloutConfig
from dovetail.models.head import fused_linear_log_prob
from dovetail.rollout import GenerationRequest, SamplingParams
from dovetail.rollout.native.engine import NativeEngine
from dovetail.rollout.native.warm_up import warm_up

def compiled():
    return {file.stem for file in pathlib.Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")}

model = ModelConfig(path=sys.argv[1], use_fused_kernels=True)
rollout = RolloutConfig(
    name="native", dtype="bfloat16", max_num_seqs=128, n=8, prompt_length=128, response_length=8,
    gpu_memory_utilization=0.1,
)
device = torch.device("cuda")
if sys.argv[2] == "ahead":
    warm_up(model, rollout, device).wait()
before = compiled()
engine = NativeEngine.from_config(rollout, model.path, device=device)
probe, sampling = SamplingParams(temperature=0.0, max_new_tokens=8), SamplingParams(n=8, max_new_tokens=8)
for lengths, how in (([5, 6, 7, 13], probe), (random.Random(0).choices(range(100, 129), k=16), sampling)):
    engine.generate([GenerationRequest(str(row), [5 + row] * n, how) for row, n in enumerate(lengths)])
weight = engine._model.get_output_embeddings().weight
for rows in (301, 64):
    hidden = torch.randn(rows, weight.size(1), device=device, dtype=weight.dtype, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.int64, device=device)
    fused_linear_log_prob(hidden, weight, labels, chunk_size=32).log_probs.sum().backward()
print(json.dumps([sorted(before), sorted(compiled() - before)]))
"""


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_a_runs_first_calls_compile_nothing_any_more(tmp_path: Path) -> None:
    """In two processes, each with a Triton cache of its own; the second shows that it matters."""
    folder = save_tiny_model("qwen2", tmp_path / "model", tokenizer=False)
    found = {}
    for how in ("ahead", "not ahead"):
        env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / how), "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALLS, str(folder), how], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found[how] = json.loads(done.stdout.splitlines()[-1])
    assert found["ahead"][0]
    assert found["ahead"][1] == []
    assert found["not ahead"][1]
