"""An engine with other weights than the trainer's is found: by the tensor, or by the token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from dovetail.backends import torch_backend
from dovetail.config.root import DovetailConfig
from dovetail.rollout.base import EngineDiedError, EngineError
from dovetail.trainer.groups import create_groups
from dovetail.weight_sync import SampledWeights, WeightMismatchError, tensor_checksum
from dovetail.workers import hybrid_engine, weight_check
from dovetail.workers.actor_rollout_ref import ActorRolloutRefWorker
from dovetail.workers.parity import PASS_MARKS, LogProbDiff, ParityError, ParityReport, coarser_dtype
from tests.models.tiny import save_tiny_model
from tests.workers.test_roles import prompts
from tests.workers.tiny_run import rollout_batch, run_config, with_old_log_probs

pytestmark = pytest.mark.engine

R = "actor_rollout_ref.rollout"
COPY = {
    # Adapters are merged on the way, so the native engine has weights of its own.
    "native": {"actor_rollout_ref.model.lora_rank": 4},
    "vllm": {
        f"{R}.name": "vllm",
        f"{R}.enforce_eager": True,
        f"{R}.max_num_seqs": 16,
        f"{R}.engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 64 << 20}},
    },
}
Tamper = Callable[[Any], None]


def one_process(folder: Path, changes: dict[str, Any] | None = None) -> DovetailConfig:
    return run_config(folder, {"trainer.n_gpus_per_node": 1, **(changes or {})})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama_tied", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=list(COPY))
def worker(request: pytest.FixtureRequest, folder: Path) -> Iterator[ActorRolloutRefWorker]:
    """A policy with an engine of its own weights, built (and proved) in this process."""
    config = one_process(folder, {**COPY[request.param], f"{R}.verify_weights": True})
    groups = create_groups(config, use_ray=False, use_gpu=False)
    groups.actor_rollout.init_model()
    built: Any = groups.actor_rollout
    yield built.worker
    built.worker.hybrid.engine.close()


def norm_of(engine: Any) -> torch.Tensor:
    model = engine._model if engine.name == "native" else engine._core.model_executor.driver_worker.worker.get_model()
    return model.model.layers[1].post_attention_layernorm.weight


def tampered(worker: ActorRolloutRefWorker, monkeypatch: pytest.MonkeyPatch, change: Tamper) -> Any:
    """After every update, something happens to the engine's weights."""
    assert worker.hybrid is not None
    engine: Any = worker.hybrid.engine
    original = engine.update_weights

    def update(weights: Any, version: int) -> None:
        original(weights, version)
        change(engine)

    monkeypatch.setattr(engine, "update_weights", update)
    return engine


def scaled_norm(engine: Any) -> None:
    with torch.no_grad():
        norm_of(engine).mul_(1.5)


def one_bit(engine: Any) -> None:
    with torch.no_grad():
        norm_of(engine)[0] += 1e-6


def train_step(worker: ActorRolloutRefWorker) -> None:
    batch = rollout_batch()
    worker.update_actor(with_old_log_probs(batch, worker.compute_log_prob(batch).tensors["old_log_probs"]))


def test_a_sound_engine_passes_at_the_start_and_after_a_step(worker: ActorRolloutRefWorker) -> None:
    assert worker.hybrid is not None
    assert not worker.hybrid.shares_weights
    train_step(worker)
    worker.generate_sequences(prompts())
    report = worker.check_parity()
    assert worker.hybrid._num_compared >= 20, "all tensors of so small a model"
    assert report.passed
    assert len(report.tokens) == 4 * 8
    assert report.mean_abs_diff <= 1e-5
    assert all(token.regret <= report.mark.largest for token in report.tokens)


def test_an_engine_of_its_own_weights_wakes_after_torch_gave_its_spare_memory_back(
    worker: ActorRolloutRefWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.hybrid is not None
    engine = worker.hybrid.engine
    happened: list[str] = []
    wake = engine.wake
    monkeypatch.setattr(hybrid_engine, "free_device_cache", lambda device: happened.append("freed"))
    monkeypatch.setattr(engine, "wake", lambda tags: (happened.extend(tags), wake(tags)))
    train_step(worker)
    worker.generate_sequences(prompts())
    assert happened == ["freed", "weights", "freed", "kv_cache"]


def test_nothing_is_given_back_where_engine_and_trainer_share_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither needs the driver's memory for the other's turn, and asking for it again takes longer than keeping it."""
    groups: Any = create_groups(one_process(folder), use_ray=False, use_gpu=False)
    groups.actor_rollout.init_model()
    worker = groups.actor_rollout.worker
    assert worker.hybrid.shares_weights
    freed: list[torch.device] = []
    for module in (hybrid_engine, torch_backend):
        monkeypatch.setattr(module, "free_device_cache", freed.append)
    train_step(worker)
    worker.generate_sequences(prompts())
    assert freed == []
    monkeypatch.setattr(hybrid_engine, "driver_is_short", lambda device: True)
    worker.generate_sequences(prompts())
    assert len(freed) == 1, "the engine's graphs need memory that torch does not hold"
    freed.clear()
    worker.actor.backend.offload(params=False, optimizer=True)
    assert len(freed) == 1


def test_one_tensor_changed_by_one_bit_is_named(worker: ActorRolloutRefWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(worker, monkeypatch, one_bit)
    with pytest.raises(WeightMismatchError, match=r"model\.layers\.1\.post_attention_layernorm\.weight\. .*native"):
        worker.check_parity()


def test_verify_weights_finds_it_in_the_step_that_it_happens(
    worker: ActorRolloutRefWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.generate_sequences(prompts())
    train_step(worker)
    tampered(worker, monkeypatch, one_bit)
    with pytest.raises(WeightMismatchError, match="post_attention_layernorm"):
        worker.generate_sequences(prompts())


def test_what_no_checksum_sees_is_found_by_the_greedy_probe(
    worker: ActorRolloutRefWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tampered(worker, monkeypatch, scaled_norm)
    monkeypatch.setattr(weight_check, "NUM_COMPARED", 0)
    report = worker.check_parity()
    assert not report.passed
    train_step(worker)
    with pytest.raises(ParityError, match=r"token \d of probe prompt \d \(id \d+\).*in the engine.*rollout\.dtype"):
        worker.generate_sequences(prompts())


def test_a_stale_tied_head_is_found(worker: ActorRolloutRefWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM packs a copy of the tied head; the native engine has one tensor for both."""
    assert worker.hybrid is not None
    if worker.hybrid.engine.name == "native":
        head = worker.hybrid.engine._model.lm_head.weight
        assert head is worker.hybrid.engine._model.model.embed_tokens.weight
        return
    from dovetail.rollout.vllm_worker import extension

    train_step(worker)
    monkeypatch.setattr(extension, "_repack_heads", lambda model: None)
    with pytest.raises(WeightMismatchError, match=r"lm_head\.weight"):
        worker.check_parity()


def test_weights_read_in_place_are_compared_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = create_groups(one_process(folder), use_ray=False, use_gpu=False)
    groups.actor_rollout.init_model()
    policy: Any = groups.actor_rollout
    worker: ActorRolloutRefWorker = policy.worker
    assert worker.hybrid is not None
    assert worker.hybrid.shares_weights
    train_step(worker)
    assert worker.check_parity().mean_abs_diff <= 1e-5

    engine: Any = worker.hybrid.engine
    layer = engine._model.model.layers[0].input_layernorm
    monkeypatch.setitem(layer._parameters, "weight", torch.nn.Parameter(layer.weight.detach() + 0.5))
    with pytest.raises(WeightMismatchError, match=r"model\.layers\.0\.input_layernorm\.weight"):
        worker.check_parity()


def test_a_run_can_start_without_the_proof(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(self: Any) -> Any:
        raise AssertionError("asked for")

    monkeypatch.setattr("dovetail.workers.hybrid_engine.HybridEngine.verify", verify)
    groups = create_groups(one_process(folder, {f"{R}.verify_start": False}), use_ray=False, use_gpu=False)
    groups.actor_rollout.init_model()


def test_a_policy_in_fp8_is_compared_with_a_plain_engine_and_nothing_is_compiled_for_that(folder: Path) -> None:
    config = one_process(folder, {"actor_rollout_ref.actor.fp8_recipe": "rowwise"})
    groups = create_groups(config, use_ray=False, use_gpu=False)
    groups.actor_rollout.init_model()  # proved there
    local: Any = groups.actor_rollout
    worker: ActorRolloutRefWorker = local.worker
    assert worker.hybrid is not None
    assert worker.hybrid.shares_weights
    assert worker.actor is not None
    torch._dynamo.reset()
    programs = CompileCounter()
    for layer in worker.actor.backend.module.hf_model.model.layers:
        layer.compile(dynamic=True, backend=programs)
    report = worker.check_parity()
    assert 1e-3 < report.mean_abs_diff < report.mark.mean
    assert programs.frame_count == 0
    worker.compute_log_prob(rollout_batch())
    assert programs.frame_count > 0


def test_marks_are_those_of_the_coarser_computation(folder: Path) -> None:
    assert coarser_dtype(run_config(folder, {"actor_rollout_ref.actor.fp8_recipe": "rowwise"})) == "float8_e4m3fn"
    quantised = {f"{R}.name": "vllm", f"{R}.quantization": "fp8"}
    assert coarser_dtype(run_config(folder, quantised)) == "float8_e4m3fn"
    assert coarser_dtype(run_config(folder)) == "float32"
    assert coarser_dtype(run_config(folder, {f"{R}.dtype": "bf16"})) == "bfloat16"
    assert coarser_dtype(run_config(folder, {"trainer.float32_matmul_precision": "medium"})) == "bfloat16"
    assert coarser_dtype(run_config(folder, {"trainer.float32_matmul_precision": "high"})) == "float16"


def test_a_report_judges_the_mean_the_largest_and_the_choice() -> None:
    mark = PASS_MARKS["float32"]

    def report(*tokens: LogProbDiff) -> ParityReport:
        return ParityReport("float32", mark, tokens)

    sound = LogProbDiff(0, 0, 5, -1.0, -1.00001, -1.00001)
    assert report(sound).passed
    assert not report(*[LogProbDiff(0, 0, 5, -1.0, -1.0005)] * 4).passed, "the mean"
    assert not report(*[sound] * 99, LogProbDiff(0, 1, 5, -1.0, -1.005)).passed, "one token"
    assert not report(*[sound] * 99, LogProbDiff(1, 2, 5, -1.0, -1.0, -0.9)).passed, "another token is better"
    assert not report(LogProbDiff(0, 0, 5, float("nan"), -1.0)).passed, "not a number"


def test_a_sample_follows_names_and_not_their_order() -> None:
    weights = [(f"layer.{n}", torch.full((3,), float(n))) for n in range(50)]

    def sample(items: list[tuple[str, torch.Tensor]]) -> dict[str, str]:
        stream = SampledWeights(items, 5, always=lambda name, tensor: name == "layer.7")
        assert [name for name, _ in stream] == [name for name, _ in items]
        return stream.checksums

    found = sample(weights)
    assert found == sample(weights[::-1])
    assert 5 <= len(found) <= 6
    assert found["layer.7"] == tensor_checksum(weights[7][1])


def test_what_killed_an_engine_is_raised_and_not_that_it_cannot_sleep(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = create_groups(one_process(folder, {f"{R}.verify_start": False}), use_ray=False, use_gpu=False)
    groups.actor_rollout.init_model()
    policy: Any = groups.actor_rollout
    engine = policy.worker.hybrid.engine

    def dies(*args: Any) -> Any:
        raise EngineDiedError("its process is gone.")

    def is_dead(*args: Any) -> Any:
        raise EngineError("there is no engine to put to sleep.")

    monkeypatch.setattr(engine, "generate", dies)
    monkeypatch.setattr(engine, "sleep", is_dead)
    with pytest.raises(EngineDiedError, match="its process is gone"):
        policy.worker.generate_sequences(prompts())
