"""The value network's two jobs: values of given responses, and updates. Holds a backend; knows no sharding."""

from __future__ import annotations

from torch import Tensor

from dovetail.algorithms import BatchCounts, compute_value_loss
from dovetail.algorithms.aggregate import token_share
from dovetail.backends.base import LossFn, TokenOutput, TrainBackend
from dovetail.config.critic import CriticConfig
from dovetail.protocol import DataProto
from dovetail.workers.micro_batches import MicroBatchLimit, cut, plan_micro_batches, restore
from dovetail.workers.mini_batches import optimizer_steps
from dovetail.workers.response_columns import MODEL_INPUTS, at_responses, response_width, take_columns
from dovetail.workers.shares import LOSS_WEIGHT, StepLog, add_shares, global_counts, with_row_weights


class DataParallelPPOCritic:
    """Values and updates of one value network. `mini_batch_rows` is this rank's part of a mini-batch, in sequences."""

    def __init__(
        self,
        config: CriticConfig,
        backend: TrainBackend,
        *,
        mini_batch_rows: int,
        loss_scale_factor: float | None = None,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.backend = backend
        self._mini_batch_rows = mini_batch_rows
        self._update_limit = MicroBatchLimit.of_update(config, mini_batch_rows)
        self._forward_limit = MicroBatchLimit.of(
            config.use_dynamic_bsz, config.forward_micro_batch_size or mini_batch_rows, config.forward_max_token_len
        )
        self._loss_scale_factor = loss_scale_factor
        self._seed = seed
        self.num_updates = 0
        """Updates so far; part of a checkpoint, because the order of a shuffle follows from it."""

    def compute_values(self, data: DataProto) -> Tensor:
        """The value before each response token, 0 outside the response mask, rows in the order given, on the CPU."""
        batch = take_columns(data, MODEL_INPUTS)
        plan = plan_micro_batches(batch, self._forward_limit, self.backend)
        outputs = self.backend.forward(cut(batch, plan))
        width = response_width(batch)
        values = restore([at_responses(output.values, width) for output in outputs], plan).float().cpu()
        mask = data.tensors.get("response_mask", data.tensors["attention_mask"][:, -width:])
        return values * mask.to(values)

    def update_critic(self, data: DataProto) -> dict[str, float]:
        """Epochs over mini-batches, one optimizer step each; metrics over all data-parallel ranks."""
        weights = [LOSS_WEIGHT] if LOSS_WEIGHT in data else []
        batch = take_columns(data, [*MODEL_INPUTS, "response_mask", "values", "returns", *weights])
        log = StepLog("critic")
        steps = optimizer_steps(batch, self._mini_batch_rows, self.config, seed=self._seed + self.num_updates)
        for index, mini_batch in enumerate(steps):
            counts = global_counts(mini_batch, self.backend)
            plan = plan_micro_batches(mini_batch, self._update_limit, self.backend)
            parts = self.backend.forward_backward(cut(mini_batch, plan), self._loss_fn(counts))
            step = self.backend.optim_step(advance_schedule=index == len(steps) - 1)
            log.add(add_shares(parts, self.backend), step)
        self.num_updates += 1
        return log.result()

    def _loss_fn(self, counts: BatchCounts) -> LossFn:
        def loss_fn(output: TokenOutput, micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
            columns = micro_batch.tensors
            mask = columns["response_mask"]
            vpreds = at_responses(output.values, response_width(micro_batch))
            own_counts = with_row_weights(counts, micro_batch)
            loss, clipfrac = compute_value_loss(
                vpreds,
                columns["returns"],
                columns["values"],
                mask,
                self.config.cliprange_value,
                self.config.loss_agg_mode,
                counts=own_counts,
                loss_scale_factor=self._loss_scale_factor,
            )
            return loss, {
                "critic/vf_loss": loss.detach(),
                "critic/vf_clipfrac": clipfrac,
                "critic/vpred_mean": token_share(vpreds.detach().float(), mask, counts),
            }

        return loss_fn
