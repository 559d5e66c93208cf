"""The Ray actors behind one or more groups: wait for calls, name the rank that failed, stop the others.

Failure rules. The first failing rank ends a wait. The other ranks get ``failure_grace_s`` to finish: ranks that are
still busy then wait in a collective for the failed one, and all processes of the group are killed. A dead process stops
its group at once. If an exception is only a consequence of a peer's death (a broken connection), the death is reported.
A call that takes far longer than earlier ones is given up. Of the ranks that have not finished, the one that hangs is
named, not those that wait for it in a collective (`hangs`).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.controller.errors import WorkerDiedError, WorkerError, WorkerHungError
from dovetail.controller.hangs import CallLimits, find_hung_rank, is_collective_timeout, not_finished
from dovetail.observability.waits import waiting

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from dovetail.controller.host import ProcessIdentity
    from dovetail.controller.watchdog import Watchdog

logger = logging.getLogger(__name__)

POLL_S = 0.5


class WorkerProcesses:
    """N actors, one per rank. Shared by the groups of all roles that live in them."""

    def __init__(
        self,
        roles: Sequence[str],
        actors: Sequence[ActorHandle],
        names: Sequence[str],
        failure_grace_s: float,
        limits: CallLimits | None = None,
    ) -> None:
        self.roles = tuple(roles)
        self.actors = list(actors)
        self.names = list(names)
        self.failure_grace_s = failure_grace_s
        self.limits = limits or CallLimits()
        self.identities: list[ProcessIdentity] = []
        self.failure: WorkerError | None = None
        self.stopped = False
        self.dies_alone = False
        """Whether somebody replaces these processes when they die: then only calls on them raise their death."""
        self.watchdog: Watchdog | None = None
        self._calls: weakref.WeakSet[RayCall] = weakref.WeakSet()
        self._lock = threading.Lock()

    @property
    def title(self) -> str:
        """The roles as one word for messages."""
        return "+".join(self.roles)

    def start(self, role: str, method: str, refs: Mapping[int, ObjectRef], *, rows: int = 0) -> RayCall:
        """Keep track of a call that was just sent to some ranks; ``rows`` is the size of its batch."""
        call = RayCall(self, role, method, refs, rows)
        with self._lock:
            self._calls.add(call)
        return call

    def check_usable(self) -> None:
        """Raise when the group can take no more calls, or when another group has died and no call has said so yet."""
        if self.failure is not None:
            if self.watchdog is not None:
                self.watchdog.mark_reported(self.failure)
            raise self.failure.with_traceback(None)
        if self.stopped:
            raise RuntimeError(f"{self.title} was shut down; build a new group.")
        unreported = self.watchdog.take_unreported() if self.watchdog is not None else None
        if unreported is not None:
            raise unreported

    def report_death(self, rank: int, reason: str) -> WorkerError:
        """A process is gone: remember why, stop the others. Returns the error to raise."""
        return self._report(WorkerDiedError, rank, reason)

    def report_hang(self, rank: int, reason: str, stacks: str = "") -> WorkerError:
        """A process exists and does not go on: remember why, kill it and the others. Returns the error to raise."""
        return self._report(WorkerHungError, rank, reason, stacks)

    def _report(self, kind: type[WorkerDiedError], rank: int, reason: str, stacks: str = "") -> WorkerError:
        with self._lock:
            if self.failure is None:
                role, method = self._lost_call(rank)
                self.failure = kind(role, rank, method, **self.place(rank), reason=reason, worker_traceback=stacks)
                logger.error("%s", self.failure)
                self._kill()
                if kind is WorkerHungError and self.watchdog is not None:
                    self.watchdog.monitors.kill(self.identities)
            return self.failure

    def place(self, rank: int) -> dict[str, Any]:
        """Pid and node of a rank, as errors have them; empty before they are known."""
        known = self.identities[rank : rank + 1]
        return {"pid": known[0].pid, "node": known[0].node} if known else {}

    def abandon(self, error: WorkerError) -> None:
        """Ranks hang in a call that has failed elsewhere: stop all of them; later calls raise ``error``."""
        with self._lock:
            if self.failure is None and not self.stopped:
                logger.error("%s: ranks are still busy after a failure; stopping the group.", self.title)
                self.failure = error
                self._kill()

    def stop(self) -> None:
        """End all processes, on purpose. A death of theirs that no call has raised is nobody's concern any more."""
        with self._lock:
            if not self.stopped:
                self.stopped = True
                self._kill()
            if self.failure is not None and self.watchdog is not None:
                self.watchdog.mark_reported(self.failure)

    def _kill(self) -> None:
        import ray

        if self.watchdog is not None:
            self.watchdog.forget(self)
        for actor in self.actors:
            ray.kill(actor, no_restart=True)

    def _lost_call(self, rank: int) -> tuple[str, str]:
        """Role and method that the dead rank was running; the method is empty when it was idle."""
        for call in list(self._calls):
            if call.was_lost_on(rank):
                return call.role, call.method
        return self.title, ""


class RayCall:
    """A method running on some ranks. `wait` is where failures surface."""

    def __init__(
        self, processes: WorkerProcesses, role: str, method: str, refs: Mapping[int, ObjectRef], rows: int = 0
    ) -> None:
        self.processes = processes
        self.rows = rows
        self.started = time.monotonic()
        self.role = role
        self.method = method
        self.refs = dict(refs)

    def done(self) -> bool:
        import ray

        refs = list(self.refs.values())
        return len(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0]) == len(refs)

    def wait(self, timeout: float | None = None, meanwhile: Callable[[], None] | None = None) -> dict[int, Any]:
        """Results by rank; the first failure of any rank, or of any other group, is raised as soon as it is known.

        ``meanwhile`` is called while the wait lasts, and looks after the other groups itself.
        Without ``timeout`` the limit that earlier calls of this method have taught ends the wait, and the group, unless
        a rank still computes: then it goes on for as long as one does.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        limits = self.processes.limits
        limit = limits.limit(self.role, self.method, self.rows)
        hung_s, computed = limit.hung_s, 0
        outputs: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        pending = {ref: rank for rank, ref in self.refs.items()}
        with waiting("the driver", f"{self.role}.{self.method}", limit_s=limit.slow_s) as wait:
            while pending and not errors:
                self._take_ready(pending, outputs, errors, POLL_S)
                if pending and not errors:
                    ranks = sorted(pending.values())
                    wait.what = f"{self.role}.{self.method} on ranks {ranks}"
                    if meanwhile is None:
                        self._check_other_groups(pending, outputs, errors)
                    else:
                        meanwhile()
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimeoutError(f"{self.role}.{self.method} still runs on ranks {ranks} after {timeout} s.")
                    if deadline is None and wait.waited() > hung_s:
                        before, computed = computed, self._progress(ranks)
                        if computed == before:
                            raise self._give_up(ranks, not_finished(wait.waited(), limit, computed))
                        hung_s = wait.waited() + limit.again_s
        if errors:
            raise self._explain(pending, outputs, errors)
        limits.record(self.role, self.method, time.monotonic() - self.started, self.rows)
        return outputs

    def _progress(self, ranks: Sequence[int]) -> int:
        watchdog, identities = self.processes.watchdog, self.processes.identities
        return watchdog.monitors.progress([identities[rank] for rank in ranks]) if watchdog and identities else 0

    def _give_up(self, ranks: Sequence[int], reason: str) -> WorkerError:
        """Of the ranks that have not finished, find the one that hangs, name it and stop the group."""
        watchdog, identities = self.processes.watchdog, self.processes.identities
        known = watchdog.monitors.stacks([identities[rank] for rank in ranks]) if watchdog and identities else []
        stacks = dict(zip(ranks, known, strict=False))
        hung = find_hung_rank(stacks)
        rank = ranks[0] if hung is None else hung
        others = [other for other in ranks if other != rank]
        if others:
            how = "wait for it in a collective" if hung is not None else "have not finished either"
            reason += f" Ranks {others} {how}."
        error = self.processes.report_hang(rank, reason, stacks.get(rank, ""))
        if watchdog is not None:
            watchdog.mark_reported(error)
        return error

    def was_lost_on(self, rank: int) -> bool:
        """Whether ``rank`` died before it finished this call."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        if rank not in self.refs:
            return False
        try:
            ray.get(self.refs[rank], timeout=0)
        except GetTimeoutError:
            return True
        except RayError as error:
            return is_death(error)
        return False

    def _take_ready(
        self, pending: dict[ObjectRef, int], outputs: dict[int, Any], errors: dict[int, BaseException], wait_s: float
    ) -> None:
        import ray
        from ray.exceptions import RayError

        ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=wait_s)
        for ref in ready:
            rank = pending.pop(ref)
            try:
                outputs[rank] = ray.get(ref)
            except RayError as error:
                errors[rank] = error

    def _check_other_groups(
        self, pending: dict[ObjectRef, int], outputs: dict[int, Any], errors: dict[int, BaseException]
    ) -> None:
        """Our ranks may wait in a collective with a group whose process died: do not wait with them."""
        watchdog = self.processes.watchdog
        failure = watchdog.take_unreported() if watchdog is not None else None
        if failure is None:
            return
        if self.processes.failure is None:
            self._drain(pending, outputs, errors)
            if pending:
                self.processes.abandon(failure)
        raise failure

    def _drain(self, pending: dict[ObjectRef, int], outputs: dict[int, Any], errors: dict[int, BaseException]) -> None:
        end = time.monotonic() + self.processes.failure_grace_s
        while pending and time.monotonic() < end and not any(is_death(error) for error in errors.values()):
            self._take_ready(pending, outputs, errors, POLL_S)

    def _explain(
        self, pending: dict[ObjectRef, int], outputs: dict[int, Any], errors: dict[int, BaseException]
    ) -> WorkerError:
        """Give the remaining ranks their grace period, then pick the error that explains the others."""
        first = next(iter(errors))
        self._drain(pending, outputs, errors)
        watchdog = self.processes.watchdog
        if watchdog is not None and self.processes.failure is None:
            watchdog.look()  # a peer's death may be known to the cluster before its call is
        death = watchdog.take_unreported() if watchdog is not None else None
        if death is None and self.processes.failure is None:
            dead = next((rank for rank, error in errors.items() if is_death(error)), None)
            if dead is not None:
                death = self.processes.report_death(dead, _reason(errors[dead]))
        if death is None and self.processes.failure is None and pending and is_collective_timeout(errors[first]):
            late = sorted(pending.values())
            death = self._give_up(late, f"Rank {first} gave up waiting for it: {_reason(errors[first])[:500]}")
        error = death or self.processes.failure or self._as_worker_error(first, errors[first])
        if watchdog is not None:
            watchdog.mark_reported(error)
        others = sorted(rank for rank in errors if rank != error.rank)
        if others:
            error.add_note(f"Failed in the same call: ranks {others} of {self.role}.")
        if pending:
            error.add_note(f"Ranks {sorted(pending.values())} of {self.role} were still running and were stopped.")
            self.processes.abandon(error)
        if error.exception is not None and error.__cause__ is None:
            error.__cause__ = error.exception
        return error

    def _as_worker_error(self, rank: int, error: BaseException) -> WorkerError:
        cause = getattr(error, "cause", None)
        if isinstance(cause, WorkerError):
            return cause
        return WorkerError(self.role, rank, self.method, **self.processes.place(rank), reason=_reason(error))


def is_death(error: BaseException) -> bool:
    """Whether a Ray error means that the process is gone, as opposed to an exception in it."""
    from ray.exceptions import LocalRayletDiedError, NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError

    return isinstance(error, (RayActorError, NodeDiedError, OutOfMemoryError, WorkerCrashedError, LocalRayletDiedError))


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)
