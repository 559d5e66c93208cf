"""A program of its own: two Ray nodes on this machine, a pool over both, an all-reduce across them. Prints JSON.

Then it joins the two nodes a second time, as a process does that trains twice, and asks for the state of processes.

Its argument is the `runtime_env` of the workers, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

from dovetail.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, start_ray, stop_ray
from dovetail.controller.process_state import Monitors
from tests.controller.listening import listening_addresses
from tests.controller.worker_examples import Collective


def main(runtime_env: dict[str, Any]) -> None:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 128 * 1024**2, "include_dashboard": False}
    no_idle_workers = {"prestart_worker_first_driver": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "_system_config": no_idle_workers})
    cluster.add_node(**node)
    start_ray(cluster.address, log_to_driver=False, runtime_env=runtime_env)
    pool = RayResourcePool([2, 2], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Collective))
    group.init_model()
    places = group.place()
    result = {
        "nodes": [slot.node_id for slot in pool.slots()],
        "worker_nodes": [identity.node_id for identity in group.identities],
        "local_ranks": [place["local_rank"] for place in places],
        "local_world_sizes": [place["local_world_size"] for place in places],
        "all_reduce": group.all_reduce(),
        "listening": listening_addresses(os.getpid(), *(identity.pid for identity in group.identities)),
    }
    monitors, identities = Monitors(), group.identities
    monitors.stopped(identities)
    group.shutdown()
    stop_ray()
    start_ray(cluster.address, log_to_driver=False, runtime_env=runtime_env)
    result["stopped_in_second_job"] = len(monitors.stopped(identities))
    stop_ray()
    cluster.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
