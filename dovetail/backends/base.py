"""What a training backend promises. Knows no RL: batches go in, a loss function is called, weights come out.

The backend owns the micro-batch loop, because only it knows when gradients must be synchronised (FSDP: at the last
micro-batch) or how micro-batches overlap (pipeline parallelism).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.backends.device_memory import memory_in_use
from dovetail.checkpoint.sharded import CONTENTS
from dovetail.models.transfer import to_device
from dovetail.models.vocabulary_divergence import Teacher
from dovetail.protocol import DataProto


@dataclass(frozen=True)
class TokenOutput:
    """Results per token in the padded layout ``[rows, seq_len]``; what a model does not compute is None.

    ``log_probs[b, t]`` is that of the token at ``t`` given those before it, ``entropy[b, t]`` of the distribution that
    predicted it, ``best[b, t]`` the log-prob of its most likely token, ``sum_squares[b, t]`` the sum of its squared
    probabilities; ``values[b, t]`` is that of the state in which it is chosen; all are 0 at ``t = 0`` and on padding.
    ``scores[b]`` is one number per row.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    best: Tensor | None = None
    sum_squares: Tensor | None = None
    top_ids: Tensor | None = None
    top_log_probs: Tensor | None = None
    """``[rows, seq_len, k]``: the most likely tokens in place of the token at ``t``."""
    listed: Tensor | None = None
    """``[rows, seq_len, k]``: log-probs of the tokens that the column ``teacher_top_ids`` lists."""
    overlap: Tensor | None = None
    """``[rows, seq_len]``: the share of them that are among the ``k`` most likely tokens."""
    hidden: Tensor | None = None
    """``[rows, seq_len, width]``: the hidden state from which the token at ``t`` is predicted."""
    divergence: Tensor | None = None
    """``[rows, seq_len]``: from the teacher's distribution, over the whole vocabulary."""
    routed_experts: Tensor | None = None
    """``[rows, seq_len, layers, k]``: the experts that the token at ``t`` was sent to; any number on padding."""
    routing_changed: Tensor | None = None
    """``[rows, seq_len]``: where experts are replayed, the share of them that routers would not choose now."""
    values: Tensor | None = None
    scores: Tensor | None = None


LossFn = Callable[[TokenOutput, DataProto], tuple[Tensor, dict[str, Tensor]]]
"""Gives one micro-batch's *share* of the mini-batch loss, and metrics as scalars on the device (no wait for it).

Shares are normalised by the counts of the whole mini-batch, so that they add up to its loss over micro-batches and
data-parallel ranks. The backend makes the gradient that of the sum, whatever its reduction does.
"""


@dataclass(frozen=True)
class ForwardOptions:
    """What a forward pass of a policy is asked for. Value and reward models take ``adapters`` only."""

    temperature: float = 1.0
    entropy: bool = False
    best: bool = False
    """Also the log-prob of the most likely token. Holds all logits of the tokens asked for: ask for few."""
    sum_squares: bool = False
    """Also the sum of squared probabilities; it has no gradient."""
    top_k: int = 0
    """Also so many of the most likely tokens, without a gradient."""
    top_vocab_size: int | None = None
    """Of ``top_k``: tokens below this id only. None: all."""
    listed: bool = False
    """Also the log-probs of the tokens in the column ``teacher_top_ids``."""
    hidden: bool = False
    """Also the hidden states that the output layer reads."""
    teacher: Teacher | None = None
    """Also the divergence from this teacher, whose hidden states are the column ``teacher_hidden``."""
    last_tokens: int | None = None
    """Log-probs of the last so many columns only (the responses); the others are 0 and cost no head. None: all."""
    only_column: str | None = None
    """Log-probs only where this column of the micro-batch is set; the others are 0 and cost no head."""
    record_experts: bool = False
    """Also the experts that each token is sent to."""
    adapters: bool = True
    """False: as if the model had no LoRA adapter, which makes an actor its own reference. Only without gradients."""


PLAIN_FORWARD = ForwardOptions()


@dataclass(frozen=True)
class StepResult:
    """One optimizer step at rate ``lr``. ``skipped``: the norm was not finite and nothing was changed."""

    grad_norm: float
    skipped: bool
    lr: float
    num_skipped: int
    """Steps skipped since the backend was built or its state was loaded, this one included."""


@dataclass(frozen=True)
class RankInfo:
    """Where this process stands. ``dp``: who reads different rows; ``sp``: who shares the tokens of the same rows."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1
    is_collected: bool = True
    """True on one of the ranks that read the same rows: its results are the ones collected."""


class TrainBackend(ABC):
    """Trains one model spread over the processes of a group. Every method is collective: all ranks call it alike."""

    def __init__(self, rank_info: RankInfo, device: torch.device) -> None:
        self.rank_info = rank_info
        self.device = device

    def check_equal_count(self, count: int) -> None:
        """Raise on every rank unless all of them have as many micro-batches: a rank with fewer would leave the others
        waiting, for its weights, its stage or its tokens."""
        if self.rank_info.world_size == 1:
            return
        bounds = torch.tensor([count, -count], device=self.device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
        most, fewest = int(bounds[0]), -int(bounds[1])
        if most != fewest:
            raise ValueError(
                f"rank {self.rank_info.rank} has {count} micro-batches, other ranks from {fewest} to {most}; "
                "plan them with the data-parallel group so that all ranks have as many"
            )

    @property
    @abstractmethod
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks that read different rows of one batch; None when there is one."""

    @property
    @abstractmethod
    def hf_config(self) -> Any:
        """The transformers configuration of the network."""

    @abstractmethod
    def unsharded_model(self, dtype: torch.dtype) -> torch.nn.Module | None:
        """The transformers model itself when an engine may read its weights in place: whole in this process, in
        ``dtype``, without adapters. None otherwise: stream ``named_weights`` then."""

    @abstractmethod
    def forward_backward(
        self, micro_batches: Sequence[DataProto], loss_fn: LossFn, options: ForwardOptions = PLAIN_FORWARD
    ) -> list[dict[str, Tensor]]:
        """Gradients of one mini-batch (one optimizer step): zeroed, accumulated, synchronised once.

        Micro-batches are on the host, also where the device is another."""

    @abstractmethod
    def forward(self, micro_batches: Sequence[DataProto], options: ForwardOptions = PLAIN_FORWARD) -> list[TokenOutput]:
        """Outputs without gradients, one per micro-batch, in order."""

    @abstractmethod
    def optim_step(self, *, advance_schedule: bool = True) -> StepResult:
        """Clip, step, advance the learning rate. A gradient norm that is not finite skips all three on every rank."""

    @abstractmethod
    def named_weights(self, *, merge_adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names, one at a time; a tied weight comes once.

        All ranks must take all of them. A tensor may be reused for the next one: copy it to keep it.
        """

    def named_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Full adapter tensors alone, under their names in memory. All ranks must take all of them."""
        return iter(())

    @abstractmethod
    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Full gradients of the trainable parameters, between ``forward_backward`` and ``optim_step``."""

    @abstractmethod
    def offload(self, *, params: bool = True, optimizer: bool = True) -> None:
        """Move state to host memory, e.g. while an engine generates. Gradients are freed by ``optim_step`` already."""

    @abstractmethod
    def onload(self, *, params: bool = True, optimizer: bool = True) -> None:
        """Bring it back. Asking for what is there already costs nothing."""

    @abstractmethod
    def save_state(
        self, folder: Path, *, extra: Mapping[str, Any] | None = None, contents: Collection[str] = CONTENTS
    ) -> None:
        """Write ``contents`` into ``folder``: weights, optimizer, and schedule with every rank's random state.

        ``extra`` is the caller's own, taken from rank 0. Atomicity is the caller's too (``checkpoint.store``). An error
        on one rank is raised on all.
        """

    def start_save(
        self, folder: Path, *, extra: Mapping[str, Any] | None = None, contents: Collection[str] = CONTENTS
    ) -> None:
        """Save the state of this moment, and let training go on before it is written where the backend can do that."""
        self.save_state(folder, extra=extra, contents=contents)

    def is_saving(self) -> bool:
        """Whether a save that was started is not on the disk yet."""
        return False

    def finish_save(self) -> None:
        """Wait for the save that was started, and raise what went wrong in it."""
        return

    @abstractmethod
    def load_state(self, folder: Path, *, contents: Collection[str] = CONTENTS) -> dict[str, Any]:
        """Read what ``save_state`` wrote, on any number of processes; return ``extra`` (empty when not asked for)."""

    def memory(self) -> dict[str, float]:
        """GiB in use on this process's device and host, ``area/name`` style keys."""
        return memory_in_use(self.device)

    def sum_over_dp(self, counts: Tensor) -> Tensor:
        """Add ``counts`` up over data-parallel ranks: the global counts that shares of a loss are normalised by."""
        counts = counts.to(self.device)
        if self.dp_group is not None:
            counts = counts.clone()
            dist.all_reduce(counts, group=self.dp_group)
        return counts

    def on_device(self, micro_batch: DataProto) -> DataProto:
        """The micro-batch on this device. The caller's own stays where it is: all of them at once may not fit."""
        tensors = to_device(dict(micro_batch.tensors), self.device)
        return DataProto.from_dict(tensors, micro_batch.non_tensor_batch, micro_batch.meta_info)
