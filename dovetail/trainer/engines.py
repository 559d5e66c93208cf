"""Engines on devices of their own, as the driver sees them: kept at the trainer's weights, started again when they die.

The trainer's group is the source. Generation and training still take turns; only the devices are different ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from dovetail.config.root import DovetailConfig
from dovetail.controller import RayWorkerGroup, WorkerGroup
from dovetail.controller.errors import WorkerDiedError, WorkerError
from dovetail.controller.futures import GroupFuture
from dovetail.controller.rendezvous import LOOPBACK
from dovetail.protocol import DataProto
from dovetail.weight_sync import GroupAddress, cancel_broadcast
from dovetail.workers.parity import ParityReport
from dovetail.workers.rollout_worker import says_engine_died
from dovetail.workers.weight_sending import SendResult

logger = logging.getLogger(__name__)

T = TypeVar("T")

GENERATION = "rollout"
"""Role of the processes that only generate."""


class EngineFailedError(RuntimeError):
    """Weights could not be brought to the engines, and no engine process is known to have died."""


class SeparateEngines:
    """`generate_sequences` like a group's. `start` builds the processes, and builds them again after a death.

    A death stops all engines: their weights arrive in one group. Prompts carry their seeds, so the batch that is
    written again is the batch that would have been written.
    """

    def __init__(self, config: DovetailConfig, trainer: WorkerGroup, start: Callable[[], WorkerGroup]) -> None:
        self._rollout = config.actor_rollout_ref.rollout
        self._trainer = trainer
        self._start = start
        self._restarts_left = self._rollout.restart_engine
        self.on_restart: Callable[[str], None] = lambda reason: None
        self.group = self._new_group()
        self.num_restarts = 0
        self._version = 0
        self._is_connected = False  # the engines have met the trainer and hold weights of it
        self._is_stale = True
        self._address: GroupAddress | None = None

    def init_model(self) -> None:
        """Start the engines, introduce them to the trainer, and prove that weights arrive."""
        self._retrying(self._initialise)

    def weights_changed(self, version: int) -> None:
        """The trainer has the weights of `version`, a global step; the engines get them before they are used."""
        self._version, self._is_stale = version, True

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers under the trainer's current weights."""

        def generate() -> DataProto:
            self._update()
            return self.group.generate_sequences(prompts)

        return self._retrying(generate)

    def bring_up_to_date(self) -> float:
        """Send the trainer's weights where the engines have older ones; returns the seconds generation was held."""
        return self._retrying(self._update)

    def recover(self, error: WorkerError) -> None:
        """Start the engines again, with the trainer's weights, if they died and may be; else raise `error`."""
        self._restart(error)
        self.bring_up_to_date()

    def check_parity(self) -> list[ParityReport]:
        """Send the weights and hold the greedy answers of each engine against the trainer's forward."""
        self._send(check=True)
        return self._judged()

    def freeze_gc(self) -> None:
        def freeze() -> None:
            if not self._is_connected:  # they have just been started again
                self._initialise()
            self.group.freeze_gc()

        self._retrying(freeze)

    def activity(self) -> list[list[tuple[str, float, float]]]:
        """What each engine did since the last call. Nothing of dead ones: the next call that needs them finds out."""
        with suppress(WorkerError):
            return self.group.take_activity()[:: self._rollout.engine_world_size]
        return []

    def shutdown(self) -> None:
        self.group.release()

    def _initialise(self) -> None:
        self.group.init_model()
        self.group.mesh_layout("rollout")  # asked for here, where a death leads to a restart; known from then on
        ranks_each = self.group.num_weight_ranks()
        opened = self._trainer.open_weight_group(sum(ranks_each), self._host())
        self._address = next(address for address in opened if address is not None)
        joining = self.group.join_weight_group.submit(self._address, ranks_each)
        connecting = self._trainer.connect_weight_group.submit()
        self._both(joining, connecting, "meet")
        self._send_and_prove(self._rollout.verify_start)

    def _update(self) -> float:
        if not self._is_connected:
            self._initialise()
        return self._send_and_prove(self._rollout.verify_weights) if self._is_stale else 0.0

    def _send_and_prove(self, proof: bool) -> float:
        held = self._send(check=proof)
        for report in self._judged() if proof else ():
            report.require(self._rollout.name)
        return held

    def _send(self, *, check: bool) -> float:
        receiving = self.group.receive_weights.submit(self._version)
        sending = self._trainer.send_weights.submit(check=check)
        held, results = self._both(receiving, sending, f"send version {self._version} to")
        if check:
            sent = next(result.sent for result in results if result.sent is not None)
            compared = self.group.compare_weights(sent)
            logger.info("weights of version %d: %s tensors of each engine compared", self._version, compared)
        self._is_connected, self._is_stale = True, False
        return max(held)

    def _both(self, engines: GroupFuture, trainer: GroupFuture, what: str) -> tuple[list[Any], list[SendResult]]:
        """Wait for a call on both sides. A death of an engine is raised as such, and only when the trainer is free."""
        try:
            received = engines.get()
        except WorkerError as error:
            if self._address is not None:
                cancel_broadcast(self._address, f"an engine failed ({error.reason})")
            raise
        finally:
            results: list[SendResult] = trainer.get()
        problem = next((result.problem for result in results if result.problem), "")
        if problem:
            raise EngineFailedError(f"the trainer could not {what} the engines: {problem}")
        return received, results

    def _judged(self) -> list[ParityReport]:
        """One report for each engine; engines that answer alike share the trainer's forward."""
        reports = []
        known: dict[str, ParityReport] = {}
        for answers in self.group.answer_probe():
            key = repr([(answer.token_ids, answer.log_probs) for answer in answers])
            if key not in known:
                known[key] = self._trainer.judge_probe(answers)[0]
            reports.append(known[key])
        return reports

    def _retrying(self, work: Callable[[], T]) -> T:
        while True:
            try:
                return work()
            except WorkerError as error:
                self._restart(error)

    def _restart(self, error: WorkerError) -> None:
        """Raises `error` where the engines did not die, or may not be started again."""
        if not _engine_died(error) or self._restarts_left <= 0:
            raise error
        self._restarts_left -= 1
        self.num_restarts += 1
        logger.warning("%s Starting the engines again; %d restarts are left.", error, self._restarts_left)
        self.on_restart(str(error))
        self.group.shutdown()
        self._is_connected = False
        self.group = self._new_group()

    def _new_group(self) -> WorkerGroup:
        group = self._start()
        if self._restarts_left > 0 and isinstance(group, RayWorkerGroup):
            group.let_die_alone()  # the trainer may be in a call of its own, and has nothing to do with it
        return group

    def _host(self) -> str:
        """Where the receivers find the trainer's rank 0."""
        groups = [group for group in (self._trainer, self.group) if isinstance(group, RayWorkerGroup)]
        nodes = [identity.node for group in groups for identity in group.identities]
        return LOOPBACK if len(set(nodes)) <= 1 else nodes[0]


def _engine_died(error: WorkerError) -> bool:
    """Whether the worker is gone, or what generates for it: a server of its own."""
    return error.role == GENERATION and (isinstance(error, WorkerDiedError) or says_engine_died(error))
