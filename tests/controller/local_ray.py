"""A program of its own: a local Ray with two workers that have met. Prints its CPUs and where it listens, as JSON."""

from __future__ import annotations

import json
import os

from dovetail.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, start_ray, stop_ray
from tests.controller.listening import listening_addresses
from tests.controller.worker_examples import Collective


def main() -> None:
    start_ray(num_cpus=2, object_store_memory=2**28, log_to_driver=False)
    import ray

    group = RayWorkerGroup(RayResourcePool([2], use_gpu=False), RayClassWithInitArgs(Collective))
    group.init_model()
    result = {"cpus": ray.cluster_resources()["CPU"], "listening": listening_addresses(os.getpid())}
    group.shutdown()
    stop_ray()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
