"""Pools stretch over nodes. In a program of its own, because it joins two Rays."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.controller.listening import is_loopback
from tests.programs import ROOT, run_program
from tests.ray_workers import quick_workers

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def two_nodes() -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "tests" / "controller" / "two_nodes.py"), json.dumps(quick_workers())]
    return run_program(words)


def test_a_pool_over_two_nodes_keeps_the_ranks_of_a_node_together(two_nodes: subprocess.CompletedProcess[str]) -> None:
    done = two_nodes
    assert done.returncode == 0, done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    first, second = result["nodes"][0], result["nodes"][3]
    assert first != second
    assert result["nodes"] == result["worker_nodes"] == [first, first, second, second]
    assert result["local_ranks"] == [0, 1, 0, 1]
    assert result["local_world_sizes"] == [2, 2, 2, 2]
    assert result["all_reduce"] == [6.0] * 4
    assert {address for address in result["listening"] if not is_loopback(address)} == set()


def test_a_process_that_joins_a_cluster_again_can_ask_for_the_state_of_processes(
    two_nodes: subprocess.CompletedProcess[str],
) -> None:
    """Actors of its first job, which answered for the other node, are gone."""
    assert two_nodes.returncode == 0, two_nodes.stdout
    assert json.loads(two_nodes.stdout.splitlines()[-1])["stopped_in_second_job"] == 0
