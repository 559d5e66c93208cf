"""Rows with images, without, and mixed, through the actor and the critic of a small vision-language model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.config.actor import Strategy
from dovetail.protocol import DataProto
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.build import build_policy, build_value
from dovetail.workers.critic import DataParallelPPOCritic
from dovetail.workers.micro_batches import MicroBatchLimit
from tests.backends.tiny import as_numpy, largest_difference
from tests.models.tiny import image_batch, save_tiny_model
from tests.ranks import run_ranks
from tests.workers.tiny_run import TOLERANCE, Updated, my_rows, run_config

pytestmark = pytest.mark.distributed

WIDTH = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("vision"))


def image_rollouts(*, axes: int = 3) -> DataProto:
    """Six rows: an image of 16 patches, text alone, an image of 32 patches, twice. Answers are the last 4 columns."""
    rows: list[dict[str, Tensor]] = []
    ids, masks = [], []
    for seed in (0, 1):
        found = image_batch(seed=seed)
        images, grid = found["multi_modal_inputs"], found["multi_modal_inputs"]["image_grid_thw"]
        first = int(grid[0].prod())
        rows.append({"pixel_values": images["pixel_values"][:first], "image_grid_thw": grid[:1]})
        rows.append({})
        rows.append({"pixel_values": images["pixel_values"][first:], "image_grid_thw": grid[1:]})
        for row, kept in zip(found["input_ids"], found["attention_mask"].bool(), strict=True):
            text = row[kept]
            padding = row.numel() - text.numel()
            ids.append(torch.cat([torch.zeros(padding, dtype=torch.long), text]))
            masks.append(torch.cat([torch.zeros(padding, dtype=torch.long), torch.ones_like(text)]))
    input_ids, mask = torch.stack(ids), torch.stack(masks)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, len(rows), WIDTH, generator=generator)
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": mask,
            "position_ids": positions(input_ids, mask, rows) if axes == 3 else (mask.cumsum(1) - 1).clamp(min=0),
            "responses": input_ids[:, -WIDTH:],
            "response_mask": mask[:, -WIDTH:],
            "advantages": noise[0],
            "values": noise[1],
            "returns": noise[2],
        },
        {"multi_modal_inputs": np.array(rows, dtype=object)},
        {"temperature": 1.0},
    )


def positions(input_ids: Tensor, mask: Tensor, rows: list[dict[str, Tensor]]) -> Tensor:
    """`[rows, 3, tokens]` (time, height, width), as a dataset writes them."""
    from dovetail.models.multimodal import multimodal_position_ids
    from tests.models.tiny import tiny_model

    grids = torch.cat([row["image_grid_thw"] for row in rows if row])
    found = multimodal_position_ids(tiny_model("qwen2_5_vl"), input_ids, mask, {"image_grid_thw": grids})
    assert found is not None
    return found


def update(
    folder: Path,
    *,
    packed: bool,
    micro_batch: int,
    world_size: int = 1,
    sp_size: int = 1,
    strategy: Strategy = "fsdp2",
    axes: int = 3,
) -> list[Updated]:
    """One step of the actor, then one of the critic. With one axis of positions the model must find the three."""
    keys = {
        "actor_rollout_ref.model.use_remove_padding": packed,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": micro_batch,
    }
    config = run_config(folder, keys)
    policy, device = config.actor_rollout_ref, torch.device("cpu")
    batch = image_rollouts(axes=axes)
    actor_backend = build_policy(
        policy.model, strategy=strategy, fsdp=policy.actor.fsdp_config, optim=policy.actor.optim,
        sp_size=sp_size, world_size=world_size, device=device,
    )  # fmt: skip
    rows = len(batch) // actor_backend.rank_info.dp_size
    mine = my_rows(batch, actor_backend.rank_info, mini_batch=len(batch))
    actor = DataParallelPPOActor(
        policy.actor, actor_backend, mini_batch_rows=rows, log_prob_limit=MicroBatchLimit(rows=micro_batch)
    )
    log_probs, _ = actor.compute_log_prob(mine)
    metrics = actor.update_policy(mine)
    metrics["log_probs"] = float(actor_backend.sum_over_dp(log_probs.sum()))
    critic_backend = build_value(
        config.critic.model, strategy=strategy, fsdp=config.critic.fsdp_config, optim=config.critic.optim,
        sp_size=sp_size, world_size=world_size, device=device,
    )  # fmt: skip
    critic = DataParallelPPOCritic(config.critic, critic_backend, mini_batch_rows=rows)
    values = critic.compute_values(mine)
    critic_metrics = critic.update_critic(mine)
    critic_metrics["values"] = float(critic_backend.sum_over_dp(values.sum()))
    return [
        Updated(metrics, as_numpy(actor_backend.named_weights())),
        Updated(critic_metrics, as_numpy(critic_backend.named_weights())),
    ]


def update_on_rank(rank: int, world_size: int, folder: Path) -> dict[str, list[Updated]]:
    return {
        "fsdp2 x2": update(folder, packed=True, micro_batch=3, world_size=2),
        "fsdp2 x2, rows of text alone on one rank": update(folder, packed=True, micro_batch=1, world_size=2),
        "padded": update(folder, packed=False, micro_batch=1, world_size=2, axes=1),
        "fsdp1 x2": update(folder, packed=True, micro_batch=1, world_size=2, strategy="fsdp"),
        "ulysses 2, rows apart": update(folder, packed=True, micro_batch=1, world_size=2, sp_size=2),
        "ulysses 2": update(folder, packed=True, micro_batch=3, world_size=2, sp_size=2, axes=1),
    }


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[Updated]:
    return update(folder, packed=True, micro_batch=6)


def require_equal(found: list[Updated], reference: list[Updated]) -> None:
    for one, other in zip(found, reference, strict=True):
        assert one.metrics == pytest.approx(other.metrics, abs=TOLERANCE, rel=TOLERANCE)
        assert largest_difference(one.weights, other.weights) < TOLERANCE


def test_gradients_reach_the_vision_tower_of_actor_and_critic(folder: Path, reference: list[Updated]) -> None:
    from transformers import AutoModelForImageTextToText

    start = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
    for updated in reference:
        tower = {name: value for name, value in updated.weights.items() if "visual.patch_embed" in name}
        assert tower
        for name, value in tower.items():
            before = next(value for key, value in start.items() if key.endswith(name.partition("visual.")[2]))
            assert abs(value - before.numpy()).max() > 100 * TOLERANCE, name


def test_packed_equals_padded_and_rows_may_be_cut_anywhere(folder: Path, reference: list[Updated]) -> None:
    """Micro-batches of 1 hold rows with no image at all: text alone must go through the same model."""
    require_equal(update(folder, packed=False, micro_batch=6), reference)
    require_equal(update(folder, packed=True, micro_batch=1, axes=1), reference)


def test_two_ranks_equal_one(folder: Path, reference: list[Updated]) -> None:
    for found in run_ranks(update_on_rank, 2, folder, timeout=300.0):
        for updated in found.values():
            require_equal(updated, reference)
