"""Start Ray on this machine, for this machine only, or join a cluster that runs already.

A Ray started here listens on loopback only. Ray decides that when it is imported, so `start_ray` must run before
anything imports ray; it refuses to start one that the network could reach.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.config.units import GIB
from dovetail.controller import reaper
from dovetail.controller.forwarding import merged_runtime_env
from dovetail.controller.resource_pool import wait_for_slots_given_back

logger = logging.getLogger(__name__)

# Ray has no "loopback only" option. With clusters switched off it binds every socket to 127.0.0.1, on Linux too.
_ALLOW_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def start_ray(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    object_store_memory: int | None = None,
    env: Mapping[str, str] | None = None,
    namespace: str | None = None,
    log_to_driver: bool = True,
    attempts: int = 2,
    **ray_init: Any,
) -> None:
    """Start a local Ray, or join the cluster at ``address`` (or ``RAY_ADDRESS``). One that runs here stays as it is.

    ``num_cpus`` is a count of slots for processes, not of cores: Ray binds nothing to a core. ``env`` goes to every
    worker, after the driver's own (`controller.forwarding`); a ``runtime_env`` among the other keywords, which go to
    ``ray.init``, is merged with both and wins. A start that times out (a busy machine) is tried once more.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        logger.info("Ray runs in this process already; using it.")
        return
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        _forbid_network()
    import ray

    settings: dict[str, Any] = {
        "namespace": namespace,
        "log_to_driver": log_to_driver,
        "logging_level": logging.WARNING,
        "configure_logging": False,
        **ray_init,
        "runtime_env": merged_runtime_env(ray_init.get("runtime_env") or {}, env),
    }
    if address is not None:
        ray.init(address=address, **settings)
        return
    settings |= {
        # Left out, Ray would join whatever cluster was last started on this machine.
        "address": "local",
        "include_dashboard": False,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "object_store_memory": object_store_memory or default_object_store_bytes(),
    }
    # It tells everyone who starts a local Ray about tokens for clusters.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    _start_reaper()
    _start_with_retry(partial(ray.init, **settings), ray.shutdown, attempts)


def default_object_store_bytes() -> int:
    """A fifth of the memory, at least 256 MiB, at most 64 GiB and at most 80 % of what /dev/shm can hold.

    On a Mac at most 2 GiB: Ray refuses to start with more.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    limit = int(shared.f_bavail * shared.f_frsize * 0.8) if shared else 64 * GIB
    most = 2 * GIB if sys.platform == "darwin" else 64 * GIB
    return max(min(memory // 5, most, limit), GIB // 4)


def stop_ray() -> None:
    """Leave Ray; a local one that `start_ray` started ends."""
    wait_for_slots_given_back()
    ray = sys.modules.get("ray")
    if ray is not None:
        ray.shutdown()
    while _REAPERS:
        process = _REAPERS.pop()
        process.kill()
        process.wait(30)


def _start_reaper() -> None:
    """The local Ray dies with this process, however that dies. See `reaper`."""
    os.environ[reaper.TAG] = tag = f"{os.getpid()}-{secrets.token_hex(4)}"
    program = str(Path(reaper.__file__))
    # Apart from our session: what kills this process with its process group must not kill the reaper.
    command = [sys.executable, "-S", "-E", program, str(os.getpid()), tag]
    quiet = subprocess.DEVNULL
    _REAPERS.append(subprocess.Popen(command, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet))


def _forbid_network() -> None:
    os.environ.setdefault(_ALLOW_CLUSTER, "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # the one thing a local Ray would tell the outside
    # One idle process per core would start beside our workers and never be used: it lacks their environment variables.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    if "ray" not in sys.modules:
        return
    from ray._private import ray_constants

    if ray_constants.ENABLE_RAY_CLUSTER and os.environ[_ALLOW_CLUSTER] == "0":
        raise RuntimeError(
            "ray was imported before start_ray(), and would listen on every network interface. Call start_ray() first, "
            f"or set {_ALLOW_CLUSTER}=0 in the environment; set it to 1 if other machines shall reach this Ray."
        )


def _start_with_retry(start: Callable[[], object], clean_up: Callable[[], object], attempts: int) -> None:
    for attempt in range(1, attempts + 1):
        try:
            start()
            return
        except Exception as error:  # Ray raises plain RuntimeErrors and ValueErrors here; all but a time-out go on up.
            clean_up()
            if attempt == attempts or "timed out" not in str(error).lower():
                raise
            logger.warning("Ray did not start (%s); trying again.", error)


_REAPERS: list[subprocess.Popen[bytes]] = []
