"""Engine and trainer with sampling masks: one distribution on both sides, from the request to the update."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.protocol import DataProto
from dovetail.protocol.sampling_mask import SAMPLING_MASK, padded_sets
from dovetail.rollout.native.engine import NativeEngine
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.build import build_policy
from dovetail.workers.generation import answers_of, requests_of
from dovetail.workers.group_stream import GroupStream
from dovetail.workers.micro_batches import MicroBatchLimit
from tests.workers.tiny_run import TOLERANCE, run_config, small_model

pytestmark = pytest.mark.unit

TOP_K, NUM_PROMPTS, N = 12, 4, 3
CUT: dict[str, Any] = {"temperature": 0.8, "top_k": TOP_K, "top_p": 0.9, "min_p": 0.01}
MODEL = "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("masks"))


def rollout(**changes: Any) -> RolloutConfig:
    keys = {"prompt_length": 6, "response_length": 8, "ignore_eos": True, "keep_sampling_mask": True, **CUT, **changes}
    return RolloutConfig(name="native", **keys)


def prompts(**meta: Any) -> DataProto:
    ids = np.empty(NUM_PROMPTS, dtype=object)
    ids[:] = [[5, 9 + row, 77][: 2 + row % 2] for row in range(NUM_PROMPTS)]
    columns = {"raw_prompt_ids": ids, "sampling_seed": np.arange(NUM_PROMPTS)}
    return DataProto.from_dict(non_tensors=columns, meta_info={"n": N, **meta})


def generated(folder: Path, settings: RolloutConfig, **meta: Any) -> DataProto:
    rows = prompts(**meta)
    requests = requests_of(rows, settings, name="r")
    results = NativeEngine(str(folder), dtype=torch.float32).generate(requests)
    return answers_of(rows, requests, results, settings, pad_token_id=0)


def policy(folder: Path, *, trains: bool = False, **model: Any) -> DataParallelPPOActor:
    config = run_config(folder, {f"{MODEL}.{key}": value for key, value in model.items()}).actor_rollout_ref
    backend = build_policy(
        config.model,
        strategy="single",
        fsdp=config.actor.fsdp_config,
        optim=config.actor.optim if trains else None,
        device=torch.device("cpu"),
    )
    limit = MicroBatchLimit(rows=5)
    return DataParallelPPOActor(config.actor, backend, mini_batch_rows=NUM_PROMPTS * N, log_prob_limit=limit)


@pytest.mark.parametrize("model", [{}, {"use_remove_padding": False}, {"use_fused_kernels": True}], ids=str)
def test_the_trainers_log_prob_of_every_token_is_the_engines(folder: Path, model: dict[str, Any]) -> None:
    batch = generated(folder, rollout())
    log_probs, entropies = policy(folder, **model).compute_log_prob(batch, calculate_entropy=True)
    engine = batch.tensors["rollout_log_probs"]
    torch.testing.assert_close(log_probs, engine, atol=TOLERANCE, rtol=0)
    assert entropies is not None
    assert 0 < float(entropies.max()) <= math.log(TOP_K)
    whole = policy(folder, **model).compute_log_prob(batch.select(non_tensor_batch_keys=[]))[0]
    assert (whole - engine).mean() < -1, "over the whole vocabulary tokens are far less likely"


def test_an_update_on_fresh_samples_has_ratio_1_and_takes_old_log_probs_or_its_own(folder: Path) -> None:
    batch = generated(folder, rollout())
    noise = torch.randn(batch.tensors["responses"].shape, generator=torch.Generator().manual_seed(0))
    batch = batch.union(DataProto.from_dict({"advantages": noise}))
    own = policy(folder, trains=True).update_policy(batch)
    assert own["rollout_corr/k3_kl"] < 1e-8
    assert own["rollout_corr/probs_diff_mean"] < TOLERANCE
    batch = batch.union(DataProto.from_dict({"old_log_probs": batch.tensors["rollout_log_probs"]}))
    given = policy(folder, trains=True).update_policy(batch)
    assert given["actor/pg_clipfrac"] == 0
    assert given["actor/grad_norm"] == pytest.approx(own["actor/grad_norm"], rel=1e-4)


def test_validation_and_greedy_responses_keep_no_masks(folder: Path) -> None:
    assert SAMPLING_MASK not in generated(folder, rollout(), do_sample=False)
    assert SAMPLING_MASK not in generated(folder, rollout(val_kwargs={"do_sample": True, **CUT}), validate=True)
    assert SAMPLING_MASK not in generated(folder, rollout(keep_sampling_mask=False))


def stream(folder: Path, settings: RolloutConfig) -> GroupStream:
    return GroupStream(NativeEngine(str(folder), dtype=torch.float32, max_num_seqs=4), settings, pad_token_id=0)


def named_prompts() -> DataProto:
    return prompts().union(DataProto.from_dict(non_tensors={"uid": [f"g{row}" for row in range(NUM_PROMPTS)]}))


def test_a_response_that_is_continued_elsewhere_has_the_mask_of_one_that_is_not(folder: Path) -> None:
    whole = stream(folder, rollout())
    whole.start(named_prompts())
    whole.run(NUM_PROMPTS)
    expected = whole.take()

    begun = stream(folder, rollout())
    begun.start(named_prompts())
    begun.run(1)
    snapshot = begun.snapshot()
    assert snapshot is not None
    lengths = (snapshot.tensors["weight_version"] >= 0).sum(dim=1)
    cut = snapshot.select_idxs((lengths == 8).nonzero().flatten()[:2])
    cut.tensors["weight_version"][:, 3:] = -1  # as if they had been in their fourth token
    cut.non_tensor_batch["finish_reason"][:] = "running"
    cut.non_tensor_batch[SAMPLING_MASK][:] = [mask[:, mask[0] < 3] for mask in cut.non_tensor_batch[SAMPLING_MASK]]
    other = stream(folder, rollout())
    other.start(named_prompts(), cut)
    other.run(NUM_PROMPTS)
    continued = other.take()

    assert expected is not None
    assert continued is not None
    order = [np.argsort(batch.non_tensor_batch["uid"], kind="stable") for batch in (expected, continued)]
    expected, continued = expected.select_idxs(order[0]), continued.select_idxs(order[1])
    assert torch.equal(continued.tensors["responses"], expected.tensors["responses"])
    sets = [padded_sets(list(batch.non_tensor_batch[SAMPLING_MASK]), 8) for batch in (expected, continued)]
    assert torch.equal(*sets)


def test_unfinished_responses_of_a_run_without_masks_are_refused(folder: Path) -> None:
    begun = stream(folder, rollout(keep_sampling_mask=False))
    begun.start(named_prompts())
    begun.run(1)
    with pytest.raises(ValueError, match=r"keep_sampling_mask=True, .* begun with the other value"):
        stream(folder, rollout()).start(named_prompts(), begun.snapshot())
