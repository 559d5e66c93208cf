"""Verify that an engine computes with the trainer's weights: checksums on both sides, then a greedy probe.

Runs where engine and trainer share processes; for engines elsewhere the driver passes the same numbers between them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.backends.base import ForwardOptions, TrainBackend
from dovetail.models.compile import uncompiled
from dovetail.rollout.base import GenerationResult, RolloutEngine
from dovetail.weight_sync import NamedTensors, SampledWeights, WeightMismatchError, require_equal
from dovetail.workers.parity import ParityProbe, ParityReport
from dovetail.workers.response_columns import at_responses

logger = logging.getLogger(__name__)

NUM_COMPARED = 32
"""Tensors that are compared after an update, besides embedding and head."""


@dataclass(frozen=True)
class SentWeights:
    """What an engine must hold after an update. Plain values: it travels to engines elsewhere.

    `vocabulary` are the tensors with a row for every token: embedding and head, or one that stands for both.
    """

    checksums: dict[str, str]
    vocabulary: tuple[str, ...]
    dtype: str

    def compare(self, engine: RolloutEngine) -> int:
        """How many tensors of the engine are those that were sent; WeightMismatchError names the others.

        0 when the engine can read none back (parts of weights on several devices, an engine elsewhere).
        """
        held = engine.weight_checksums(list(self.checksums), getattr(torch, self.dtype))
        if not held:
            logger.info("the %s engine cannot read its weights back; only the greedy probe checks them.", engine.name)
            return 0
        sent = dict(self.checksums)
        if len(self.vocabulary) == 1:
            # A head tied to the embedding may be a copy of its own in the engine, and goes stale unseen.
            sent |= dict.fromkeys(held.keys() - sent.keys(), sent[self.vocabulary[0]])
        try:
            require_equal(sent, held, where=f"the {engine.name} engine after a weight update")
        except WeightMismatchError as error:
            raise WeightMismatchError(
                f"{error} The engine would generate with other weights than are trained. Use a release of the engine "
                "that `dovetail doctor` finds in range, or actor_rollout_ref.rollout.name=native, which takes the "
                "same stream."
            ) from error
        return len(held)


class WatchedWeights:
    """A stream of weights that can say afterwards what it held, rounded to the engine's `dtype`."""

    def __init__(self, weights: NamedTensors, hf_config: Any, dtype: str) -> None:
        rows = int(hf_config.get_text_config().vocab_size)
        self._dtype = dtype
        self._stream = SampledWeights(
            weights,
            NUM_COMPARED,
            dtype=getattr(torch, dtype),
            always=lambda name, tensor: tensor.dim() == 2 and len(tensor) == rows,
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._stream)

    def sent(self) -> SentWeights:
        """Complete once the stream has been read to its end."""
        return SentWeights(self._stream.checksums, tuple(self._stream.always), self._dtype)


def compare_answers(probe: ParityProbe, answers: Sequence[GenerationResult], backend: TrainBackend) -> ParityReport:
    """The engine's answers against the trainer's forward. Collective: every rank of the backend calls it.

    Greedy responses of engines may differ at a near tie, and ranks that share sequences must read the same rows. So
    every rank computes all distinct sets of responses, each once.
    """
    everyone = [list(answers)]
    if backend.rank_info.world_size > 1:
        everyone = [[] for _ in range(backend.rank_info.world_size)]
        dist.all_gather_object(everyone, list(answers))
    distinct = {_tokens(one): probe.batch(one) for one in everyone}
    width = next(iter(distinct.values())).tensors["responses"].shape[1]
    # A forward without gradients is a program of its own, and many runs would compile it for this call alone.
    with uncompiled():
        outputs = backend.forward(list(distinct.values()), ForwardOptions(best=True, last_tokens=width))
    mine = outputs[list(distinct).index(_tokens(answers))]
    return probe.judge(answers, _on_host(mine.log_probs, width), _on_host(mine.best, width))


def _tokens(answers: Sequence[GenerationResult]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(answer.token_ids) for answer in answers)


def _on_host(tokens: Tensor | None, width: int) -> Any:
    return None if tokens is None else at_responses(tokens, width).float().cpu()
