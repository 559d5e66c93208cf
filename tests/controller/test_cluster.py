"""A local Ray cannot be reached from the network, and pools stretch over nodes."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dovetail.controller.cluster import default_object_store_bytes
from tests.ahead import ahead
from tests.controller.conftest import Roles
from tests.controller.listening import listening_addresses

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
ENVIRONMENT = dict(os.environ)


def test_every_socket_of_a_local_ray_and_its_workers_listens_on_loopback(roles: Roles) -> None:
    roles["actor"].init_model()
    addresses = listening_addresses(os.getpid())
    assert len(addresses) > 8, "the raylet, the GCS, four workers and their store listen somewhere"
    assert {address for address in addresses if not _is_loopback(address)} == set()


@ahead
def two_nodes(folder: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "tests.controller.two_nodes"]
    return subprocess.run(program, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)


def test_a_pool_over_two_nodes_keeps_the_ranks_of_a_node_together(two_nodes: subprocess.CompletedProcess[str]) -> None:
    done = two_nodes
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    first, second = result["nodes"][0], result["nodes"][3]
    assert first != second
    assert result["nodes"] == result["worker_nodes"] == [first, first, second, second]
    assert result["local_ranks"] == [0, 1, 0, 1]
    assert result["local_world_sizes"] == [2, 2, 2, 2]
    assert result["all_reduce"] == [6.0] * 4
    assert {address for address in result["listening"] if not _is_loopback(address)} == set()


def test_ray_imported_too_early_is_refused() -> None:
    program = "import ray, dovetail.controller as c; c.start_ray(num_cpus=1)"
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert done.returncode != 0
    assert "ray was imported before start_ray()" in done.stderr


def test_a_ray_that_somebody_else_started_on_this_machine_is_left_alone() -> None:
    """Ray notes the last cluster in a file, and would join it."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # short: Ray puts sockets there
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        program = (
            "import dovetail.controller as c; c.start_ray(num_cpus=1, object_store_memory=2**28); "
            "import ray; print(ray.cluster_resources()['CPU']); c.stop_ray()"
        )
        env = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("RAY_")}
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=env | {"RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1.0"


def test_the_object_store_is_bounded() -> None:
    assert 256 * 1024**2 <= default_object_store_bytes() <= 64 * 1024**3


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
