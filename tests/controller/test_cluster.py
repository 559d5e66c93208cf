"""A local Ray cannot be reached from the network and joins no other; pools stretch over the nodes of a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dovetail.controller.cluster import default_object_store_bytes
from tests.controller.listening import is_loopback
from tests.programs import ENVIRONMENT, ROOT, run_program
from tests.ray_workers import quick_workers

pytestmark = pytest.mark.distributed

# Without Ray's, as in a shell.
ENV = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("RAY_")}


@pytest.fixture(scope="module")
def local_ray() -> dict[str, Any]:
    """In a program of its own, which has no sockets but Ray's, beside a file that names another cluster."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # short: Ray puts sockets there
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        program = ["python", str(ROOT / "tests" / "controller" / "local_ray.py")]
        done = run_program(program, env=ENV | {"RAY_TMPDIR": folder, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def test_every_socket_of_a_local_ray_and_its_workers_listens_on_loopback(local_ray: dict[str, Any]) -> None:
    addresses = local_ray["listening"]
    assert len(addresses) > 6, "the raylet, the GCS, two workers and their store listen somewhere"
    assert {address for address in addresses if not is_loopback(address)} == set()


def test_ray_imported_too_early_is_refused() -> None:
    program = "import ray, dovetail.controller as c; c.start_ray(num_cpus=1)"
    done = run_program(["python", "-c", program], env=ENV)
    assert done.returncode != 0
    assert "ray was imported before start_ray()" in done.stdout


@pytest.mark.slow
def test_a_ray_that_somebody_else_started_on_this_machine_is_left_alone(local_ray: dict[str, Any]) -> None:
    """Ray notes the last cluster in a file, and would join it."""
    assert local_ray["cpus"] == 2.0


def test_the_object_store_is_bounded() -> None:
    assert 256 * 1024**2 <= default_object_store_bytes() <= 64 * 1024**3


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
