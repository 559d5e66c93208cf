"""An update whose first mini-batch has no old log-probs but its own equals one that got them from a pass before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.protocol import DataProto
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.mini_batches import OWN_OLD_LOG_PROBS
from tests.backends.tiny import as_numpy, largest_difference
from tests.workers.layouts import PADDED, ByLayout, BySetting, Layout, assert_same_updates, train_layouts
from tests.workers.test_actor import build
from tests.workers.test_actor_parity import build_actor
from tests.workers.tiny_run import MINI_BATCH, TOLERANCE, Updated, my_rows, rollout_batch, small_model

DYNAMIC = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 25}


def with_pass(batch: DataProto, actor: DataParallelPPOActor) -> DataProto:
    """With the old log-probs of all rows, by a pass before the update."""
    return batch.select().union(DataProto.from_dict({"old_log_probs": actor.compute_log_prob(batch)[0]}))


def with_own(batch: DataProto, actor: DataParallelPPOActor, rows: int) -> DataProto:
    """With those of all rows but the first, as a trainer sends them."""
    others = with_pass(batch, actor).tensors["old_log_probs"]
    others[:rows] = torch.nan
    return batch.select().union(DataProto.from_dict({"old_log_probs": others}, meta_info={OWN_OLD_LOG_PROBS: True}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("policy"))


@pytest.mark.unit
@pytest.mark.parametrize(
    "changes",
    [
        {},
        DYNAMIC,
        {"model_use_fused_kernels": True, "model_use_remove_padding": False},
        {"entropy_coeff": 0.01, "policy_loss": {"loss_mode": "gspo"}},
        {"policy_loss": {"loss_mode": "kl_cov", "kl_cov_ratio": 0.3}},
        {"policy_loss": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0}},
    ],
    ids=["plain", "dynamic", "fused, padded", "gspo", "kl_cov", "clip_cov"],
)
def test_an_update_with_log_probs_of_its_own_is_the_one_after_a_pass(folder: Path, changes: dict[str, Any]) -> None:
    found, expected = (build(folder, mini_batch_rows=MINI_BATCH, **changes) for _ in range(2))
    batch = rollout_batch()
    update = found.update(with_own(batch, found, MINI_BATCH))
    first = expected.compute_log_prob(batch)[0][:MINI_BATCH]
    assert update.metrics == pytest.approx(expected.update_policy(with_pass(batch, expected)), abs=TOLERANCE)
    assert update.old_log_probs is not None
    torch.testing.assert_close(update.old_log_probs, first, atol=TOLERANCE, rtol=0)
    weights = [as_numpy(actor.backend.named_weights()) for actor in (found, expected)]
    assert largest_difference(*weights) < TOLERANCE
    assert largest_difference(weights[0], as_numpy(build(folder).backend.named_weights())) > 100 * TOLERANCE


@pytest.mark.unit
def test_it_is_the_same_to_the_bit_where_the_pass_cuts_rows_as_the_update_does(folder: Path) -> None:
    found, expected = (build(folder, mini_batch_rows=MINI_BATCH) for _ in range(2))
    batch = rollout_batch()
    update = found.update(with_own(batch, found, MINI_BATCH))
    first = expected.compute_log_prob(batch)[0][:MINI_BATCH]
    assert update.metrics == expected.update_policy(with_pass(batch, expected))
    assert update.old_log_probs is not None
    assert torch.equal(update.old_log_probs, first)
    assert largest_difference(*(as_numpy(actor.backend.named_weights()) for actor in (found, expected))) == 0


@pytest.mark.unit
def test_an_update_that_got_all_log_probs_returns_none(folder: Path) -> None:
    actor, batch = build(folder, mini_batch_rows=MINI_BATCH), rollout_batch()
    assert actor.update(with_pass(batch, actor)).old_log_probs is None
    assert build(folder).update(batch).old_log_probs is None


LAYOUTS = {
    "reference": Layout(1),
    "dynamic micro-batches": Layout(1, tokens=25),
    "fsdp2 x2, padded": Layout(2, model=PADDED),
    "fsdp x2, dynamic": Layout(2, "fsdp", tokens=20),
    "ulysses 2, dynamic, fused head": Layout(2, sp_size=2, tokens=12, model={"use_fused_kernels": True}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ByLayout:
    return train_layouts(LAYOUTS, train, prepare, tmp_path_factory.mktemp("trained"))


def prepare(rank: int, world_size: int, folder: Path) -> tuple[Path, DataProto]:
    batch = rollout_batch()
    reference = DataProto.from_dict({"ref_log_prob": batch.tensors["ref_noise"] - 6.0})
    return small_model(folder / "model"), batch.union(reference)


def train(folder: Path, layout: Layout, batch: DataProto) -> BySetting:
    found: BySetting = {}
    for setting in ("own", "pass"):
        actor = build_actor(folder, layout, {})
        mine = my_rows(batch, actor.backend.rank_info)
        rows = MINI_BATCH // actor.backend.rank_info.dp_size
        expected = actor.compute_log_prob(mine)[0][:rows]
        update = actor.update(with_own(mine, actor, rows) if setting == "own" else with_pass(mine, actor))
        if update.old_log_probs is not None:
            torch.testing.assert_close(update.old_log_probs, expected, atol=TOLERANCE, rtol=0)
        found[setting] = Updated(update.metrics, as_numpy(actor.backend.named_weights()))
    return found


@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_does_not_depend_on_the_layout(name: str, trained: ByLayout) -> None:
    reference = trained["reference"][0]["pass"]
    assert_same_updates(trained[name], {"own": reference, "pass": reference})
