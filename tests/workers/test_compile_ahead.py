"""Layers compiled ahead of a run are those that the run calls: the same graphs of the same inputs, or no cache hits."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.backends.compile_ahead import FIRST_PASS, CompileAhead, Pass, _digest, compile_ahead, run_two_layers
from dovetail.backends.sharding import Precision
from dovetail.backends.single import SingleProcess
from dovetail.models.compile import compile_layers
from dovetail.models.load import build_meta_model
from dovetail.models.lora import add_lora
from dovetail.models.policy import PolicyModel
from dovetail.workers.actor_rollout_ref import ActorRolloutRefWorker
from dovetail.workers.build import build_actor
from dovetail.workers.offline import OfflineWorker
from dovetail.workers.preferences import PreferenceWorker
from dovetail.workers.sft import SFTWorker
from tests.models.tiny import run_model, tiny_config
from tests.workers.tiny_run import NUM_ROWS, run_config, small_model

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
# Without the compilers that fail, which `make test` and `make test-all` put first.
REAL_PATH = os.pathsep.join(part for part in os.get_exec_path() if Path(part).name != "no_compiler")
MIXED = Precision(torch.float32, torch.bfloat16, torch.float32)
BOTH: tuple[Pass, ...] = ("no_grad", "grad")


def on_meta(family: str = "qwen2") -> Any:
    return build_meta_model(tiny_config(family), "policy")


def started() -> CompileAhead:
    ahead = compile_ahead(on_meta(), MIXED, CPU, BOTH)
    assert ahead is not None
    return ahead


def with_lora() -> Any:
    model = on_meta()
    add_lora(model, rank=2, alpha=4, target_modules="all-linear")
    return model


def train_and_score(model: Any, length: int) -> None:
    """What a step asks of the model, with two sequences: log-probs without gradients, then an update."""
    compile_layers(model)
    sharding = SingleProcess(PolicyModel(model, use_fused_kernels=True), MIXED, CPU)
    for parameter in sharding.module.parameters():
        nn.init.normal_(parameter.data, std=0.02)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, 3:] = 0
    ids = torch.randint(0, 300, mask.shape)
    with sharding.compute_context():
        with torch.no_grad():
            run_model(sharding.module.eval(), ids, mask, need_entropy=True)
        run_model(sharding.module.train(), ids, mask).log_probs.sum().backward()


@pytest.mark.parametrize("build", [on_meta, pytest.param(with_lora, marks=pytest.mark.slow)])
def test_the_graphs_of_a_run_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch, build: Callable[[], Any]) -> None:
    monkeypatch.setattr("dovetail.backends.compile_ahead._TOKENS", 23)  # a graph is handed over with sizes in numbers
    graphs: set[str] = set()

    def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        kinds = [
            (x.dtype, x.shape, x.stride(), x.requires_grad, x.is_leaf) if isinstance(x, Tensor) else x for x in inputs
        ]
        graphs.add(f"{graph.code}\n{torch.is_grad_enabled()} {torch.is_autocast_enabled('cpu')} {kinds}")
        return graph.forward

    def compile_by_note(self: nn.Module, **options: Any) -> None:
        self._compiled_call_impl = torch.compile(self._call_impl, backend=note, **options)

    monkeypatch.setattr(nn.Module, "compile", compile_by_note)

    def graphs_of(run: Callable[[], None]) -> set[str]:
        torch._dynamo.reset()
        graphs.clear()
        run()
        return set(graphs)

    def ahead() -> None:
        for trains in (False, True):
            run_two_layers(pickle.loads(pickle.dumps(build().base_model)), MIXED, CPU, trains=trains)

    expected = graphs_of(lambda: train_and_score(build(), 20))
    assert len(expected) >= 8
    assert graphs_of(ahead) == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++", path=REAL_PATH) is None, reason="compiles for the CPU")
def test_a_run_finds_what_was_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", REAL_PATH)
    for compiler in ("CC", "CXX"):
        monkeypatch.delenv(compiler, raising=False)
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "g++"))  # where PyTorch has read the environment
    torch.set_float32_matmul_precision("highest")  # as a worker does: it counts, even where it changes nothing
    monkeypatch.setattr("dovetail.backends.compile_ahead.WAIT_S", 600.0)
    ahead = started()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with caplog.at_level(logging.INFO), ahead.around("grad"), ahead.around("no_grad"):
        train_and_score(on_meta(), 5000)  # up to 4096 tokens PyTorch sums differently
    counters = torch._dynamo.utils.counters
    assert counters["inductor"]["fxgraph_cache_hit"] >= 8
    assert counters["inductor"]["fxgraph_cache_miss"] == counters["aot_autograd"]["autograd_cache_miss"] == 0
    (said,) = (r.args for r in caplog.records if r.msg == FIRST_PASS and "'grad'" in str(r.args))
    assert isinstance(said, dict)
    assert said["hits"] >= 8
    assert said["misses"] == said["autograd_misses"] == 0
    assert said["compiler_s"] > 0


def test_a_process_that_fails_is_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.executable", shutil.which("false") or os.devnull)
    monkeypatch.setattr("dovetail.backends.compile_ahead.WAIT_S", 60.0)
    with caplog.at_level(logging.INFO):
        ahead = started()
        for name in BOTH:
            with ahead.around(name):
                pass
    for name in BOTH:
        assert f"layers ({name}) are compiled in the first step, not before: status 1" in caplog.text
        assert f"first pass ({name}): layers compiled ahead: failed, waited for" in caplog.text


def test_nothing_is_compiled_ahead_for_a_deterministic_run_nor_beside_a_vision_tower() -> None:
    assert compile_ahead(on_meta("qwen2_5_vl"), MIXED, CPU, BOTH) is None
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert compile_ahead(on_meta(), MIXED, CPU, BOTH) is None
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("switch", [{"force_disable_caches": True}, {"fx_graph_cache": False}])
def test_nothing_is_compiled_ahead_for_a_cache_that_is_switched_off(
    switch: dict[str, bool],
) -> None:
    with torch._inductor.config.patch(switch):
        assert compile_ahead(on_meta(), MIXED, CPU, BOTH) is None


def test_the_mark_of_an_earlier_run_is_that_of_the_same_layers() -> None:
    def digest(model: Any, precision: Precision = MIXED) -> str:
        return _digest(model.base_model, {"precision": precision, "device": CPU, "matmul": "high"})

    frozen = on_meta()
    next(frozen.parameters()).requires_grad_(False)
    others = [on_meta("qwen3"), with_lora(), frozen]
    assert digest(on_meta()) == digest(on_meta())
    full = Precision(torch.float32, torch.float32, torch.float32)
    assert len({digest(on_meta()), digest(on_meta(), full), *map(digest, others)}) == 5


class Begun(Exception):
    pass


@pytest.mark.parametrize(
    ("engine", "device", "begins"), [("native", "cuda", True), ("native", "cpu", False), ("vllm", "cuda", False)]
)
def test_only_beside_the_embedded_engine_on_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, device: str, begins: bool
) -> None:
    def begin(hf_model: Any, precision: Precision, device: torch.device, passes: Sequence[Pass]) -> None:
        pickle.dumps(hf_model.base_model)  # no hooks of gradient checkpointing yet, which cannot be
        raise Begun

    def stop(*unused: Any, **also_unused: Any) -> None:
        raise RuntimeError("far enough")

    monkeypatch.setattr("dovetail.workers.build.compile_ahead", begin)
    monkeypatch.setattr("dovetail.workers.build.PolicyModel", stop)
    keys = {
        "actor_rollout_ref.rollout.name": engine,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    }
    policy = run_config(small_model(tmp_path), keys).actor_rollout_ref
    with pytest.raises(Begun if begins else RuntimeError):
        build_actor(policy, 1, world_size=1, device=torch.device(device))


RL, SFT, DPO = ActorRolloutRefWorker, SFTWorker, PreferenceWorker
ONE_STEP = {"actor_rollout_ref.actor.ppo_mini_batch_size": NUM_ROWS}
KL = {"actor_rollout_ref.actor.use_kl_loss": True}
LORA = {"actor_rollout_ref.model.lora_rank": 4}
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
BYPASS = {"algorithm.rollout_correction.bypass_mode": True}
VALIDATED = {"data.val_files": "val.jsonl"}


@pytest.mark.parametrize(
    ("role", "keys", "also_scores"),
    [
        (RL, ONE_STEP, False),
        (RL, {}, True),  # old log-probs of all mini-batches but the first
        (RL, BYPASS, False),
        (RL, ONE_STEP | {"algorithm.use_kl_in_reward": True}, True),
        (RL, ONE_STEP | KL, True),  # the reference, a model like the actor
        (RL, ONE_STEP | KL | LORA, False),
        (RL, ONE_STEP | KL | {"actor_rollout_ref.ref.use_torch_compile": False}, False),
        (RL, ONE_STEP | {LOSS: "clip_cov"}, True),
        (RL, ONE_STEP | {LOSS: "gspo"}, False),
        (SFT, {}, False),
        (SFT, VALIDATED, True),
        (DPO, {}, True),
        (DPO, LORA, False),
        (DPO, {"dpo.loss_type": "simpo"}, False),
        (DPO, LORA | {"dpo.loss_type": "kto"}, True),
    ],
)
def test_passes_without_gradients_are_compiled_ahead_where_the_run_has_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    role: type[ActorRolloutRefWorker | OfflineWorker],
    keys: dict[str, Any],
    also_scores: bool,
) -> None:
    begun: list[Sequence[Pass]] = []

    def begin(hf_model: Any, precision: Precision, device: torch.device, passes: Sequence[Pass]) -> None:
        begun.append(passes)
        raise Begun

    monkeypatch.setattr("dovetail.workers.build.compile_ahead", begin)
    monkeypatch.setattr(role, "device", torch.device("cuda"))
    with pytest.raises(Begun):
        role(run_config(small_model(tmp_path), keys)).init_model(1)
    assert begun == [BOTH if also_scores else ("grad",)]
