"""A local Ray cannot be reached from the network, and joins no other."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dovetail.controller.cluster import default_object_store_bytes
from tests.controller.conftest import Roles
from tests.controller.listening import is_loopback, listening_addresses

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
ENVIRONMENT = dict(os.environ)


def test_every_socket_of_a_local_ray_and_its_workers_listens_on_loopback(roles: Roles) -> None:
    roles["actor"].init_model()
    addresses = listening_addresses(os.getpid())
    assert len(addresses) > 8, "the raylet, the GCS, four workers and their store listen somewhere"
    assert {address for address in addresses if not is_loopback(address)} == set()


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
