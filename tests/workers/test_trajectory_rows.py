"""Trajectories of unequal numbers of rows: each weighs as one, and ranks change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.algorithms.aggregate import LOSS_AGG_MODES
from dovetail.config.algorithm import AlgorithmConfig
from dovetail.protocol import DataProto
from dovetail.rollout.assemble import Response, assemble
from dovetail.trainer.arrange import group_sizes, lay_out
from dovetail.trainer.batch_math import add_advantages, with_padding
from tests.backends.tiny import as_numpy, largest_difference
from tests.ranks import run_alone, run_ranks
from tests.workers.layouts import Layout
from tests.workers.test_actor import build
from tests.workers.test_actor_parity import build_actor
from tests.workers.tiny_run import TOLERANCE, Updated, small_model

PROMPT = (5, 6, 7)
TURNS = [((11, 12, 13), True), ((21, 22), False), ((31,), True), ((41, 42, 43), False), ((51, 52), True)]
"""What one trajectory is made of: tokens, and whether the policy sampled them."""
GROUP_ROWS = ([1, 3], [2, 2], [1, 1], [4, 1])
"""Of four groups, the rows of each trajectory."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("policy"))


def response(parts: Sequence[tuple[tuple[int, ...], bool]]) -> Response:
    tokens = [(token, sampled) for ids, sampled in parts for token in ids]
    return Response(
        tuple(token for token, _ in tokens),
        tuple(sampled for _, sampled in tokens),
        tuple(-1.0 if sampled else 0.0 for _, sampled in tokens),
        tuple(0 if sampled else -1 for _, sampled in tokens),
        "stop",
    )


def as_one_row() -> list[tuple[tuple[int, ...], Response]]:
    return [(PROMPT, response(TURNS))]


def as_branches() -> list[tuple[tuple[int, ...], Response]]:
    """A row for each turn with everything before it, sampled once."""
    return [
        (PROMPT, response([(ids, sampled and place == turn) for place, (ids, sampled) in enumerate(TURNS[: turn + 1])]))
        for turn in (0, 2, 4)
    ]


def as_calls() -> list[tuple[tuple[int, ...], Response]]:
    """A row for each call of the model: everything before it is its prompt."""
    before = [tuple(token for ids, _ in TURNS[:turn] for token in ids) for turn in (0, 2, 4)]
    return [((*PROMPT, *tokens), response([TURNS[turn]])) for tokens, turn in zip(before, (0, 2, 4), strict=True)]


def batch_of(trajectories: Sequence[Sequence[tuple[tuple[int, ...], Response]]], uids: Sequence[str]) -> DataProto:
    rows = [row for segments in trajectories for row in segments]
    batch = assemble([prompt for prompt, _ in rows], [answer for _, answer in rows], pad_token_id=0)
    places = [(number, segment) for number, segments in enumerate(trajectories) for segment in range(len(segments))]
    columns: dict[str, Any] = {
        "uid": np.array([uids[number] for number, _ in places], dtype=object),
        "trajectory": np.array([number for number, _ in places]),
        "segment": np.array([segment for _, segment in places]),
    }
    batch.meta_info["temperature"] = 1.0
    return batch.union(DataProto.from_dict(non_tensors=columns))


def with_advantages(batch: DataProto, scores: dict[int, float]) -> DataProto:
    """As the trainer adds them; a trajectory's score is on the last token of its last row."""
    numbers, segments = batch.non_tensor_batch["trajectory"], batch.non_tensor_batch["segment"]
    rewards = torch.zeros(batch.tensors["responses"].shape)
    for number, score in scores.items():
        last = max(np.flatnonzero(numbers == number), key=lambda row: segments[row])
        rewards[last, int(batch.tensors["response_mask"][last].nonzero().max())] = score
    columns = DataProto.from_dict({"token_level_rewards": rewards})
    return add_advantages(batch.union(columns), AlgorithmConfig(adv_estimator="grpo"), num_repeat=2)


@pytest.mark.unit
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_trajectory_weighs_the_same_however_many_rows_it_became(folder: Path, mode: str) -> None:
    other = [((8, 9), response([((61, 62, 63, 64), True)]))]
    weights = []
    for rows in (as_one_row(), as_branches(), as_calls()):
        batch = with_advantages(batch_of([rows, other], ["a", "a"]), {0: 1.0, 1: 0.0})
        actor = build(folder, mini_batch_rows=len(batch), loss_agg_mode=mode, entropy_coeff=0.1)
        # A horizon of its own: the width of the batch depends on the rows.
        actor._loss_scale_factor = 16.0
        metrics = actor.update_policy(batch)
        weights.append((metrics, as_numpy(actor.backend.named_weights())))
    before = as_numpy(build(folder).backend.named_weights())
    assert largest_difference(weights[0][1], before) > 100 * TOLERANCE
    for metrics, other_weights in weights[1:]:
        assert metrics == pytest.approx(weights[0][0], abs=TOLERANCE)
        assert largest_difference(weights[0][1], other_weights) < TOLERANCE


@pytest.mark.unit
def test_advantages_are_of_trajectories_and_hold_for_all_their_rows() -> None:
    other = [((8, 9), response([((61, 62), True)]))]
    batch = with_advantages(batch_of([as_branches(), other, other], ["a"] * 3), {0: 2.0, 1: 1.0, 2: 0.0})
    advantages, mask = batch.tensors["advantages"], batch.tensors["response_mask"].bool()
    assert advantages[:3][mask[:3]].tolist() == pytest.approx([1.0] * 6, abs=1e-5)
    assert advantages[3:][mask[3:]].tolist() == pytest.approx([0.0, 0.0, -1.0, -1.0], abs=1e-5)
    assert not advantages[~mask].any()
    assert batch.tensors["loss_weight"].tolist() == pytest.approx([3 / 6, 1 / 6, 2 / 6, 1, 1])


def ragged_batch() -> DataProto:
    generator = torch.Generator().manual_seed(3)

    def ids(least: int, most: int) -> tuple[int, ...]:
        count = int(torch.randint(least, most + 1, (1,), generator=generator))
        return tuple(torch.randint(3, 259, (count,), generator=generator).tolist())

    trajectories, uids = [], []
    for group, counts in enumerate(GROUP_ROWS):
        for count in counts:
            rows = [(ids(2, 6), response([(ids(1, 4), True), (ids(1, 3), False), (ids(1, 4), True)]))] * 1
            rows += [(ids(2, 6), response([(ids(1, 4), True)])) for _ in range(count - 1)]
            trajectories.append(rows)
            uids.append(f"draw-{group}")
    batch = batch_of(trajectories, uids)
    return with_advantages(batch, {number: float(number % 2) for number in range(len(trajectories))})


def train(rank: int, world_size: int, folder: Path) -> dict[str, Updated]:
    """Two mini-batches of two groups each, laid out as the trainer does."""
    batch = ragged_batch()
    sizes = group_sizes(batch.non_tensor_batch["uid"], 2)
    layout = lay_out(batch.tensors["attention_mask"].sum(dim=1).tolist(), world_size, sizes)
    rows = with_padding(batch, layout.rows, layout.mini_batch_rows).chunk(world_size)[rank]
    updated: dict[str, Updated] = {}
    actor = None
    for name in ("seq-mean-token-mean", "seq-mean-token-sum", "token-mean"):
        setting = {"loss_agg_mode": name, "use_kl_loss": False, "ppo_epochs": 2, "shuffle": name == "token-mean"}
        actor = build_actor(folder, Layout(world_size, micro_batch=2), setting, like=actor)
        old = actor.compute_log_prob(rows)[0]
        columns = {**rows.tensors, "old_log_probs": old}
        metrics = actor.update_policy(DataProto.from_dict(columns, rows.non_tensor_batch, rows.meta_info))
        updated[name] = Updated(metrics, as_numpy(actor.backend.named_weights()))
    return updated


@pytest.mark.distributed
def test_ragged_rows_give_the_same_weights_on_one_and_two_ranks(folder: Path) -> None:
    """On two real ranks: padding, counts over ranks and mini-batches of unequal sizes meet only there."""
    alone = run_alone(train, folder)
    for ranks in run_ranks(train, 2, folder):
        for name, updated in ranks.items():
            assert updated.metrics == pytest.approx(alone[name].metrics, abs=TOLERANCE, rel=TOLERANCE), name
            assert largest_difference(updated.weights, alone[name].weights) < TOLERANCE, name


@pytest.mark.unit
def test_mini_batches_hold_whole_groups_and_ranks_equal_numbers_of_rows() -> None:
    batch = ragged_batch()
    sizes = group_sizes(batch.non_tensor_batch["uid"], 2)
    assert sizes == [8, 7]
    layout = lay_out(batch.tensors["attention_mask"].sum(dim=1).tolist(), 4, sizes)
    assert layout.mini_batch_rows == [2, 2]
    assert layout.order != layout.rows
    assert sorted(layout.order) == list(range(15))
    padded = with_padding(batch, layout.rows, layout.mini_batch_rows)
    padding = torch.tensor(layout.rows) < 0
    assert not padded.tensors["response_mask"][padding].any()
    assert not padded.tensors["loss_weight"][padding].any()
