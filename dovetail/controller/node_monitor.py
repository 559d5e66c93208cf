"""Inspects worker processes from outside, on any node.

The driver reads the process table of its own machine; on every other node a small actor of its own process does.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.controller.process_state import ProcessState, kill_processes, read_stacks, stopped_processes

if TYPE_CHECKING:
    from dovetail.controller.host import ProcessIdentity

logger = logging.getLogger(__name__)

ANSWER_S = 10.0


class NodeMonitor:
    """Answers for the processes of one node. A Ray actor on other nodes, a plain object on the driver's."""

    def stopped(self, pids: Sequence[int]) -> dict[int, ProcessState]:
        return stopped_processes(pids)

    def stacks(self, files: Mapping[int, int | None]) -> dict[int, str]:
        return {pid: read_stacks(pid, file) for pid, file in files.items()}

    def kill(self, pids: Sequence[int]) -> None:
        kill_processes(pids)


class Monitors:
    """One monitor for each node that has workers. Asks all nodes at once; one that does not answer is left out."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}

    def ask(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """`method` of the monitors of these nodes, each with its own argument; answers by node id."""
        import ray
        from ray.exceptions import RayError

        here = ray.get_runtime_context().get_node_id()
        waiting = {
            node: getattr(self._actor(node), method).remote(value) for node, value in arguments.items() if node != here
        }
        answers = {here: getattr(NodeMonitor(), method)(arguments[here])} if here in arguments else {}
        ready, late = (
            ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=ANSWER_S) if waiting else ([], [])
        )
        for node, reference in waiting.items():
            if reference in late:
                logger.warning("the monitor of node %s has not answered for %.0f s.", node, ANSWER_S)
            elif reference in ready:
                try:
                    answers[node] = ray.get(reference, timeout=ANSWER_S)
                except RayError as error:  # the node is gone: the deaths of its workers are noticed without it
                    logger.warning("the monitor of node %s is gone: %s", node, error)
                    self._actors.pop(node, None)
        return answers

    def stopped(self, identities: Sequence[ProcessIdentity]) -> dict[int, ProcessState]:
        """By pid of the worker: itself, or the child of it that is stopped."""
        nodes: dict[str, list[int]] = defaultdict(list)
        for identity in identities:
            nodes[identity.node_id].append(identity.pid)
        answers = self.ask("stopped", nodes)
        return {
            identity.pid: answers[identity.node_id][identity.pid]
            for identity in identities
            if identity.pid in answers.get(identity.node_id, {})
        }

    def stacks(self, identities: Sequence[ProcessIdentity]) -> list[str]:
        """Where the Python code of each process is, in the order given; empty where it cannot be asked."""
        nodes: dict[str, dict[int, int | None]] = defaultdict(dict)
        for identity in identities:
            nodes[identity.node_id][identity.pid] = identity.stack_file
        answers = self.ask("stacks", nodes)
        return [answers.get(identity.node_id, {}).get(identity.pid, "") for identity in identities]

    def kill(self, identities: Sequence[ProcessIdentity]) -> None:
        """SIGKILL: Ray asks a worker to end itself, which a stopped one cannot."""
        nodes: dict[str, list[int]] = defaultdict(list)
        for identity in identities:
            nodes[identity.node_id].append(identity.pid)
        self.ask("kill", nodes)

    def _actor(self, node_id: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node_id not in self._actors:
            self._actors[node_id] = (
                ray.remote(NodeMonitor)
                .options(
                    num_cpus=0,
                    name=f"monitor-{node_id[:8]}-{os.getpid()}",
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                )
                .remote()
            )
        return self._actors[node_id]
