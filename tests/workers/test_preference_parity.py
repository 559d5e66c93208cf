"""The same preferences give the same metrics, gradient norm and weights, however the update is cut and spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.algorithms.offline import preference_loss, reward_model_loss
from dovetail.backends.base import RankInfo
from dovetail.config.methods import DPOConfig
from dovetail.data.examples import pad_rows
from dovetail.protocol import DataProto
from dovetail.workers.build import build_actor, build_value
from dovetail.workers.micro_batches import MicroBatchLimit
from dovetail.workers.offline import IS_PADDING, OfflineLearner
from tests.backends.tiny import as_numpy, largest_difference
from tests.workers.layouts import PADDED, ByLayout, BySetting, Layout, assert_same_updates, train_layouts
from tests.workers.tiny_run import TOLERANCE, Updated, run_config, small_model

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "reference": Layout(1),
    "pairs one by one": Layout(1, micro_batch=2),
    "dynamic micro-batches": Layout(1, tokens=60),
    "padded": Layout(1, model=PADDED),
    "fsdp2 x2": Layout(2),
    "fsdp2 x2, dynamic, padded": Layout(2, tokens=60, model=PADDED),
    "megatron, TP2": Layout(2, "megatron"),
}
LOSSES = ("ipo", "kto", "orpo", "simpo")
PAIRS = 6


def prepare(rank: int, world_size: int, folder: Path) -> tuple[Path, DataProto]:
    """Six pairs of different lengths, the last of which only fills up a rank."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number in range(2 * PAIRS):
        length = 6 + (5 * number) % 11
        ids = torch.randint(3, 250, (length,), generator=generator).tolist()
        rows.append((ids, [int(at >= 3) for at in range(length)]))
    columns = pad_rows(rows, 0) | {
        IS_PADDING: torch.tensor([number >= 2 * PAIRS - 2 for number in range(2 * PAIRS)], dtype=torch.int8),
        "ref_log_prob_sum": -8.0 * torch.tensor([float(sum(mask)) for _, mask in rows]),
        "desirable": torch.tensor([True, False, True, False, False, True]).repeat_interleave(2),
        "margin": torch.rand(PAIRS, generator=generator).repeat_interleave(2),
    }
    return small_model(folder / "model"), DataProto.from_dict(columns)


def train(folder: Path, layout: Layout, batch: DataProto) -> BySetting:
    limit = MicroBatchLimit.of(layout.tokens is not None, layout.micro_batch, layout.tokens or 1)
    policy = build_backend(folder, layout, "actor_rollout_ref.actor", "actor_rollout_ref.model")
    trained: BySetting = {}
    for name in LOSSES:
        settings = DPOConfig(loss_type=name).model_dump(exclude={"loss_type"})
        learner = OfflineLearner(policy, preference_loss(name, **settings), limit)
        metrics = learner.update(my_pairs(batch, policy.rank_info))
        trained[name] = Updated(metrics, as_numpy(policy.named_weights()))
    network = build_backend(folder, layout, "critic", "critic.model")
    learner = OfflineLearner(network, reward_model_loss(center_coefficient=0.1), limit, area="critic")
    metrics = learner.update(my_pairs(batch, network.rank_info))
    trained["reward"] = Updated(metrics, as_numpy(network.named_weights()))
    if layout.strategy == "megatron":
        from tests.megatron_groups import destroy_layout

        destroy_layout()
    return trained


def build_backend(folder: Path, layout: Layout, role: str, model: str) -> Any:
    changes = {**layout.keys(role, model), f"{role}.strategy": layout.strategy, f"{role}.optim.lr": 1e-3}
    if layout.strategy == "megatron":
        changes[f"{role}.megatron"] = {"dtype": "float32", "tensor_model_parallel_size": layout.world_size}
    config = run_config(folder, changes)
    device = torch.device("cpu")
    if role != "critic":
        return build_actor(config.actor_rollout_ref, 10, world_size=layout.world_size, device=device)
    critic = config.critic
    return build_value(
        critic.model, strategy=critic.strategy, fsdp=critic.fsdp_config, megatron=critic.megatron,
        optim=critic.optim, world_size=layout.world_size, role="reward", device=device,
    )  # fmt: skip


def my_pairs(batch: DataProto, rank_info: RankInfo) -> DataProto:
    """Every other pair, on two ranks."""
    pairs = range(rank_info.dp_rank, PAIRS, rank_info.dp_size)
    return batch.select_idxs([2 * pair + row for pair in pairs for row in range(2)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ByLayout:
    return train_layouts(LAYOUTS, train, prepare, tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "reference"])
def test_an_update_does_not_depend_on_its_layout(name: str, trained: ByLayout) -> None:
    assert_same_updates(trained[name], trained["reference"][0])


def test_the_updates_that_are_compared_move_the_weights(trained: ByLayout) -> None:
    updates = trained["reference"][0]
    for first, second in zip(list(LOSSES)[:-1], list(LOSSES)[1:], strict=True):
        assert largest_difference(updates[first].weights, updates[second].weights) > 50 * TOLERANCE
    assert updates["kto"].metrics["kl"] > 0.1
    assert updates["orpo"].metrics["nll_loss"] > 1
    assert updates["reward"].metrics["critic/grad_norm"] > 0.01
