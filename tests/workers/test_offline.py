"""An offline update: its loss by hand and by transformers, and the same weights however it is cut and spread."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.algorithms.offline.registry import OfflineLoss, preference_loss
from dovetail.algorithms.offline.sft import sft_loss
from dovetail.data.examples import pad_rows
from dovetail.protocol import DataProto
from dovetail.workers.build import build_actor
from dovetail.workers.micro_batches import MicroBatchLimit, plan_micro_batches
from dovetail.workers.offline import IS_PADDING, OfflineLearner
from tests.backends.tiny import as_numpy, largest_difference
from tests.workers.layouts import PADDED, ByLayout, BySetting, Layout, assert_same_updates, slow_on_four, train_layouts
from tests.workers.tiny_run import TOLERANCE, Updated, run_config, small_model

pytestmark = pytest.mark.timeout(900)

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
LORA = {"lora_rank": 4, "lora_alpha": 8}


@dataclass(frozen=True)
class AnyLayout(Layout):
    """Also Megatron's sizes."""

    megatron: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "reference": Layout(1),
    "micro-batches of 1": Layout(1, micro_batch=1),
    "dynamic micro-batches": Layout(1, tokens=36),
    "padded": Layout(1, model=PADDED),
    "fused head": Layout(1, model={"use_fused_kernels": True}),
    "lora": Layout(1, model=LORA),
    "fsdp2 x2": Layout(2),
    "fsdp2 x2, dynamic, padded": Layout(2, tokens=40, model=PADDED),
    "ulysses 2, dynamic": Layout(2, sp_size=2, tokens=20),
    "lora, fsdp2 x2": Layout(2, model=LORA, like="lora"),
    "megatron, TP2": AnyLayout(2, "megatron", megatron={"tensor_model_parallel_size": 2}),
    "megatron, PP2, dynamic": AnyLayout(2, "megatron", tokens=40, megatron={"pipeline_model_parallel_size": 2}),
    "fsdp2 x4": Layout(4, micro_batch=2),
}
LOSSES = {
    "sft": sft_loss,
    "sigmoid": lambda: preference_loss("sigmoid", beta=0.1, label_smoothing=0.0),
}


def rows(count: int = 8) -> DataProto:
    """Rows of 4 to 18 tokens, some of two answers; the last two only fill up ranks."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(count):
        length = 4 + 2 * number
        ids = torch.randint(3, 250, (length,), generator=generator).tolist()
        made.append((ids, [int(at >= length // 2 and at != length - 2) for at in range(length)]))
    columns = pad_rows(made, 0)
    columns[IS_PADDING] = torch.tensor([number >= count - 2 for number in range(count)], dtype=torch.int8)
    columns["ref_log_prob_sum"] = -torch.rand(count, generator=generator) * 20
    return DataProto.from_dict(columns)


def build_learner(folder: Path, layout: Layout, loss: OfflineLoss, like: OfflineLearner | None = None) -> Any:
    changes = {**layout.keys(ACTOR, MODEL), f"{ACTOR}.strategy": layout.strategy}
    changes[f"{ACTOR}.ulysses_sequence_parallel_size"] = layout.sp_size
    if isinstance(layout, AnyLayout):
        changes[f"{ACTOR}.megatron"] = {"dtype": "float32", **layout.megatron}
    actor = run_config(folder, changes).actor_rollout_ref
    backend = like.backend if like else build_actor(
        actor, 10, world_size=layout.world_size, device=torch.device("cpu")
    )  # fmt: skip
    limit = MicroBatchLimit.of(layout.tokens is not None, layout.micro_batch, layout.tokens or 1)
    return OfflineLearner(backend, loss, limit)


def train(folder: Path, layout: Layout, batch: DataProto) -> BySetting:
    trained: BySetting = {}
    learner = None
    for name, loss in LOSSES.items():
        learner = build_learner(folder, layout, loss(), learner)
        place = learner.backend.rank_info
        mine = batch.chunk(place.dp_size)[place.dp_rank]  # on the last of four ranks all rows are padding
        before = learner.evaluate(mine, learner.totals(mine))
        metrics = learner.update(mine)
        # The loss of an update is that of the weights before it.
        assert metrics["loss"] == pytest.approx(before["loss"], abs=TOLERANCE)
        trained[name] = Updated(metrics, as_numpy(learner.backend.named_weights()))
    if layout.strategy == "megatron":
        from tests.megatron_groups import destroy_layout

        destroy_layout()
    return trained


def prepare(rank: int, world_size: int, folder: Path) -> tuple[Path, DataProto]:
    return small_model(folder / "model"), rows()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ByLayout:
    return train_layouts(LAYOUTS, train, prepare, tmp_path_factory.mktemp("trained"))


@pytest.mark.distributed
@pytest.mark.parametrize("name", slow_on_four(LAYOUTS, [n for n in LAYOUTS if n not in ("reference", "lora")]))
def test_an_update_does_not_depend_on_its_layout(name: str, trained: ByLayout) -> None:
    assert_same_updates(trained[name], trained[LAYOUTS[name].like][0])


@pytest.mark.distributed
def test_the_updates_that_are_compared_move_the_weights(trained: ByLayout) -> None:
    sft, pairs = trained["reference"][0].values()
    assert largest_difference(sft.weights, pairs.weights) > 100 * TOLERANCE
    assert sft.metrics["actor/grad_norm"] > 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


def test_the_loss_is_the_cross_entropy_that_transformers_computes_of_the_trained_tokens(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    batch = rows()
    learner = build_learner(model, Layout(1, micro_batch=3), sft_loss())
    totals = learner.totals(batch)
    measured = learner.evaluate(batch, totals)
    real = batch.select_idxs(list(range(6))).tensors
    labels = real["input_ids"].long().masked_fill(real["loss_mask"] == 0, -100)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected = network(
            input_ids=real["input_ids"].long(), attention_mask=real["attention_mask"].long(), labels=labels
        ).loss
    assert measured["loss"] == pytest.approx(float(expected), abs=1e-5)
    assert totals == {"tokens": float((labels != -100).sum())}


def test_the_loss_by_hand() -> None:
    """Two rows in two micro-batches: 3 trained tokens in all, so each counts a third."""
    loss = sft_loss()
    log_probs = torch.tensor([[0.0, -1.0, -2.0], [0.0, -4.0, -8.0]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    totals = loss.count({"loss_mask": mask})
    shares = [loss.share(log_probs[row : row + 1], {"loss_mask": mask[row : row + 1]}, totals)[0] for row in (0, 1)]
    assert totals == {"tokens": 3.0}
    assert [float(share) for share in shares] == pytest.approx([1.0, 4 / 3])


def test_log_prob_sums_are_those_of_the_trained_tokens_in_the_order_of_the_rows(model: Path) -> None:
    batch = rows()
    learner = build_learner(model, Layout(1, tokens=30), sft_loss())
    sums = learner.log_prob_sums(batch)
    for row in (0, 3, 5):
        alone = learner.evaluate(batch.select_idxs([row]), {"tokens": 1.0})
        assert float(sums[row]) == pytest.approx(-alone["loss"], rel=1e-4)


def test_rows_that_belong_together_are_not_parted(model: Path) -> None:
    loss = preference_loss("sigmoid", beta=0.1, label_smoothing=0.0)
    learner = build_learner(model, Layout(1, micro_batch=1), loss)
    by_rows, by_tokens = (
        plan_micro_batches(rows(), limit, learner.backend, rows_each=2).partitions
        for limit in (MicroBatchLimit(rows=1), MicroBatchLimit(tokens=40))
    )
    assert by_rows == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(tuple(part[at : at + 2]) for part in by_tokens for at in range(0, len(part), 2)) == [
        (0, 1), (2, 3), (4, 5), (6, 7),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="7 rows on this rank do not make examples of 2 rows"):
        learner.update(rows().select_idxs(list(range(7))))
