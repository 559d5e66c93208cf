"""The actor with recorded experts: they keep to their rows, through micro-batches, mini-batches and the update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.protocol import DataProto
from dovetail.protocol.routed_experts import ROUTED_EXPERTS
from dovetail.rollout.native.engine import NativeEngine
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.build import build_actor, build_policy
from dovetail.workers.generation import answers_of, requests_of
from dovetail.workers.group_stream import GroupStream
from dovetail.workers.micro_batches import MicroBatchLimit
from tests.workers.tiny_run import MINI_BATCH, rollout_batch, run_config, small_model

pytestmark = pytest.mark.unit

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", num_experts=8)


def build(folder: Path, *, limit: MicroBatchLimit | None = None, **changes: Any) -> DataParallelPPOActor:
    """Two mini-batches; `changes` are keys of `actor`, or of `model` when they start with `model_`."""
    sections = {
        f"{MODEL}.{key.removeprefix('model_')}" if key.startswith("model_") else f"{ACTOR}.{key}": value
        for key, value in changes.items()
    }
    policy = run_config(folder, sections).actor_rollout_ref
    backend = build_policy(
        policy.model,
        strategy="single",
        fsdp=policy.actor.fsdp_config,
        optim=policy.actor.optim,
        replays_routing=True,
        device=torch.device("cpu"),
    )
    return DataParallelPPOActor(
        policy.actor, backend, mini_batch_rows=MINI_BATCH, log_prob_limit=limit or MicroBatchLimit(rows=4)
    )


def scored(actor: DataParallelPPOActor, batch: DataProto) -> DataProto:
    result = actor.score_responses(batch, record_experts=True)
    assert result.routed_experts is not None
    columns = {"old_log_probs": result.log_probs}
    return batch.select().union(DataProto.from_dict(columns, {ROUTED_EXPERTS: result.routed_experts}))


def test_the_record_of_a_row_is_its_own_however_rows_are_cut(folder: Path) -> None:
    batch = rollout_batch()
    alone = scored(build(folder, limit=MicroBatchLimit(rows=1)), batch)
    lengths = batch.tensors["attention_mask"].sum(1).tolist()
    assert [row.shape for row in alone.non_tensor_batch[ROUTED_EXPERTS]] == [(length, 2, 2) for length in lengths]
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    limit = MicroBatchLimit(tokens=30)  # of rows that are similar in length
    for settings in ({}, {"model_use_remove_padding": False}):
        shuffled = scored(build(folder, limit=limit, **settings), batch.select_idxs(order))
        for row, source in enumerate(order.tolist()):
            expected = alone.non_tensor_batch[ROUTED_EXPERTS][source]
            assert np.array_equal(shuffled.non_tensor_batch[ROUTED_EXPERTS][row], expected)


def test_rows_replay_their_own_experts_in_any_order(folder: Path) -> None:
    other = build(folder)
    other.update_policy(scored(other, rollout_batch()))  # other weights
    batch = scored(other, rollout_batch())
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    for limit in (MicroBatchLimit(rows=3), MicroBatchLimit(tokens=25)):
        actor = build(folder, limit=limit)
        replayed = actor.score_responses(batch.select_idxs(order)).log_probs
        torch.testing.assert_close(replayed, build(folder).score_responses(batch).log_probs[order], atol=1e-5, rtol=0)
        again = actor.score_responses(batch.select_idxs(order), record_experts=True).routed_experts
        assert again is not None
        for row, source in enumerate(order.tolist()):
            assert np.array_equal(again[row], batch.non_tensor_batch[ROUTED_EXPERTS][source])


def test_an_update_replays_in_every_step_and_recomputed_layers_too(folder: Path) -> None:
    found = []
    for checkpointing in (False, True):
        changes = {"model_enable_gradient_checkpointing": checkpointing, "optim": {"lr": 3e-2, "eps": 1e-3}}
        actor = build(folder, **changes)
        metrics = actor.update_policy(scored(actor, rollout_batch()))
        weights = {name: weight.clone() for name, weight in actor.backend.named_weights()}
        found.append((metrics, weights))
    (kept, kept_weights), (recomputed, recomputed_weights) = found
    assert 0 < kept["actor/routing_changed_share"] < 1
    assert recomputed["actor/routing_changed_share"] == kept["actor/routing_changed_share"]
    for name, weight in kept_weights.items():
        torch.testing.assert_close(recomputed_weights[name], weight, atol=1e-6, rtol=0)


def test_at_unchanged_weights_an_update_that_replays_is_the_plain_one(folder: Path) -> None:
    batch = rollout_batch().select_idxs(list(range(MINI_BATCH)))
    results = []
    for replays in (True, False):
        actor = build(folder)
        rows = scored(actor, batch)
        rows = rows if replays else rows.select(non_tensor_batch_keys=[])
        metrics = actor.update_policy(rows)
        results.append((metrics, {name: weight.clone() for name, weight in actor.backend.named_weights()}))
    (replayed, weights), (plain, expected) = results
    assert replayed.pop("actor/routing_changed_share") == 0
    assert replayed == plain
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def rollout(**changes: Any) -> RolloutConfig:
    keys = {"prompt_length": 6, "response_length": 24, "ignore_eos": True, "enable_rollout_routing_replay": True}
    return RolloutConfig(name="native", **keys | changes)


def prompts(**meta: Any) -> DataProto:
    ids = np.empty(8, dtype=object)
    ids[:] = [[5, 9 + row, 77, 100 + row][: 2 + row % 3] for row in range(8)]
    names = [f"g{row}" for row in range(8)]
    columns = {"raw_prompt_ids": ids, "sampling_seed": np.arange(8), "uid": np.array(names, dtype=object)}
    return DataProto.from_dict(non_tensors=columns, meta_info={"n": 4, **meta})


def generated(folder: Path, settings: RolloutConfig, dtype: torch.dtype, **meta: Any) -> DataProto:
    rows = prompts(**meta)
    requests = requests_of(rows, settings, name="r")
    engine = NativeEngine(str(folder), dtype=dtype, keep_experts=True)
    return answers_of(rows, requests, engine.generate(requests), settings, pad_token_id=0)


def test_the_trainer_takes_the_experts_of_an_engine_that_rounds_and_comes_nearer_to_its_log_probs(folder: Path) -> None:
    batch = generated(folder, rollout(), torch.bfloat16)
    engine, mask = batch.tensors["rollout_log_probs"], batch.tensors["response_mask"].bool()
    actor = build(folder)
    replayed = actor.score_responses(batch, record_experts=True)
    plain = actor.score_responses(batch.select(non_tensor_batch_keys=[]), record_experts=True)
    assert replayed.routed_experts is not None
    assert plain.routed_experts is not None
    others = 0
    rows = zip(batch.non_tensor_batch[ROUTED_EXPERTS], replayed.routed_experts, plain.routed_experts, strict=True)
    for recorded, used, own in rows:
        assert len(recorded) == len(used) - 1, "the engine has not read the last token"
        assert np.array_equal(recorded, used[:-1])
        others += int((np.sort(own[:-1]) != np.sort(recorded)).any(axis=(1, 2)).sum())
    assert others > 10, "some tokens go elsewhere in float32"
    with_r3, without = ((scores.log_probs - engine)[mask].abs() for scores in (replayed, plain))
    assert with_r3.mean() < 0.8 * without.mean()
    assert with_r3.max() < 0.5 * without.max()


def test_at_equal_weights_and_dtypes_engine_and_trainer_agree_with_and_without(folder: Path) -> None:
    batch = generated(folder, rollout(), torch.float32)
    replayed = build(folder).score_responses(batch).log_probs
    torch.testing.assert_close(replayed, batch.tensors["rollout_log_probs"], atol=1e-5, rtol=0)


def test_validation_keeps_no_experts(folder: Path) -> None:
    assert ROUTED_EXPERTS not in generated(folder, rollout(), torch.float32, validate=True)
    assert ROUTED_EXPERTS in generated(folder, rollout(), torch.float32, do_sample=False)


def test_methods_that_sample_nothing_train_a_model_without_experts_whatever_the_mode(tmp_path: Path) -> None:
    """Where the mode is said to have no effect, as for a run file that supervised fine-tuning shares."""
    policy = run_config(small_model(tmp_path, "llama"), {f"{ACTOR}.router_replay.mode": "R2"}).actor_rollout_ref
    build_actor(policy, 1, world_size=1, device=torch.device("cpu"))


def stream_of(folder: Path, settings: RolloutConfig) -> GroupStream:
    engine = NativeEngine(str(folder), dtype=torch.float32, max_num_seqs=4, keep_experts=True)
    return GroupStream(engine, settings, pad_token_id=0)


def test_a_response_that_is_continued_elsewhere_has_the_experts_of_one_that_is_not(folder: Path) -> None:
    def stream() -> GroupStream:
        return stream_of(folder, rollout())

    whole = stream()
    whole.start(prompts())
    whole.run(8)
    expected = whole.take()
    begun = stream()
    begun.start(prompts())
    begun.run(3)
    snapshot = begun.snapshot()
    again = stream()
    again.start(prompts(), snapshot)
    again.run(8)
    found = again.take()
    assert expected is not None
    assert found is not None
    by_tokens = {
        tuple(ids): experts
        for ids, experts in zip(
            expected.tensors["input_ids"].tolist(), expected.non_tensor_batch[ROUTED_EXPERTS], strict=True
        )
    }
    for ids, experts in zip(found.tensors["input_ids"].tolist(), found.non_tensor_batch[ROUTED_EXPERTS], strict=True):
        assert np.array_equal(np.sort(experts), np.sort(by_tokens[tuple(ids)]))


def test_snapshots_of_several_engines_go_on_whether_or_not_a_response_of_each_has_finished(
    folder: Path, tmp_path: Path
) -> None:
    under_way, done = stream_of(folder, rollout()), stream_of(folder, rollout())
    under_way.start(prompts().slice(0, 1))
    under_way._begin(["g0"])
    looks = iter([False] * 3)
    under_way._stream._engine.wait(lambda: next(looks, True))  # a step for each look
    done.start(prompts().slice(1, 3))
    done.run(2)
    snapshots = [stream.snapshot() for stream in (under_way, done)]
    reasons = [set(part.non_tensor_batch["finish_reason"]) for part in snapshots if part is not None]
    assert reasons == [{"running"}, {"length"}]
    DataProto.concat([part for part in snapshots if part is not None]).save_to_disk(tmp_path / "rows")

    again = stream_of(folder, rollout())
    again.start(prompts().slice(0, 3), DataProto.load_from_disk(tmp_path / "rows"))
    again.run(3)
    taken = again.take()
    assert taken is not None
    lengths = taken.tensors["attention_mask"].sum(dim=1)
    assert [len(experts) + 1 for experts in taken.non_tensor_batch[ROUTED_EXPERTS]] == lengths.tolist()


def test_a_response_that_may_have_no_more_tokens_after_a_resume_has_experts(folder: Path) -> None:
    """The engine that ends a response says its experts."""
    begun = stream_of(folder, rollout())
    begun.start(prompts().slice(0, 1))
    begun._begin(["g0"])
    looks = iter([False] * 10)
    begun._stream._engine.wait(lambda: next(looks, True))
    snapshot = begun.snapshot()
    assert snapshot is not None
    again = stream_of(folder, rollout(response_length=4))
    again.start(prompts().slice(0, 1), snapshot)
    again.run(1)
    taken = again.take()
    assert taken is not None
    assert taken.tensors["responses"].tolist() == snapshot.tensors["responses"][:, :4].tolist()
    assert [len(experts) for experts in taken.non_tensor_batch[ROUTED_EXPERTS]] == [2 + 3] * 4


def test_a_checkpoint_of_the_other_setting_is_refused_by_name(folder: Path) -> None:
    settings = rollout()
    begun = stream_of(folder, settings)
    begun.start(prompts())
    begun.run(3)
    snapshot = begun.snapshot()
    without = settings.model_copy(update={"enable_rollout_routing_replay": False})
    with pytest.raises(ValueError, match="enable_rollout_routing_replay=False, and the checkpoint"):
        stream_of(folder, without).start(prompts(), snapshot)
