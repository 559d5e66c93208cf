"""Finish a batch after an engine died, where the trainer's weights are sharded over several processes.

Gathering weights is collective, so a rank whose engine died cannot reload them alone. Every rank finishes its own
requests, then all ranks exchange their status: those with a dead engine restart it, all gather the weights, and the
lost requests are generated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.rollout.base import EngineDiedError, EngineError, GenerationRequest, GenerationResult, RolloutEngine


def generate_together(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    *,
    reload: Callable[[bool], None],
    gather: Callable[[str], Sequence[str]],
) -> list[GenerationResult]:
    """Results in the order of the requests. Collective.

    `gather(word)` gives the words of all ranks, in their order; `reload(mine)` is called on all ranks after a death,
    with whether this rank's engine needs the weights.
    """
    finished: dict[str, list[GenerationResult]] = {}
    while True:
        death = _generate_into(finished, engine, requests)
        words = gather(_word(engine, death))
        if not any(words):
            return [result for request in requests for result in finished[request.request_id]]
        lost = next((f"rank {rank}: {word}" for rank, word in enumerate(words) if word.startswith(_LOST)), "")
        if lost:
            # Every rank raises: the others would wait for this one in the next gather.
            raise EngineError(f"an engine died and is not started again ({lost}).") from death
        if death is not None:
            engine.restart(death)
        reload(death is not None)


def _generate_into(
    finished: dict[str, list[GenerationResult]], engine: RolloutEngine, requests: Sequence[GenerationRequest]
) -> EngineDiedError | None:
    left = [request for request in requests if request.request_id not in finished]
    if not left:
        return None
    try:
        for result in engine.generate(left):
            finished.setdefault(result.request_id, []).append(result)
    except EngineDiedError as error:
        finished.update(error.finished)
        return error
    return None


_LOST = "no restart is left"


def _word(engine: RolloutEngine, death: EngineDiedError | None) -> str:
    if death is None:
        return ""
    return str(death) if engine.restarts_left > 0 else f"{_LOST}: {death}"
