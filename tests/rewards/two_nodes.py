"""A program of its own: two Ray nodes on this machine score one batch; then one of them is lost. Prints JSON.

Its arguments are a folder and the `runtime_env` of Ray's workers, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

from dovetail.controller import start_ray, stop_ray
from dovetail.protocol import DataProto
from dovetail.rewards.functions import FunctionSpec
from dovetail.rewards.runner import RewardRunner
from tests.models.tiny import tiny_tokenizer
from tests.rewards.test_runner import answers

FUNCTION = """
import os, time

def who(data_source, solution_str, ground_truth, extra_info):
    folder = os.path.dirname(__file__)
    open(os.path.join(folder, str(os.getppid())), "w").close()
    deadline = time.monotonic() + 60
    # Until both nodes have scored, so that neither can do all the work alone.
    while len(os.listdir(folder)) < 3 + os.path.exists(os.path.join(folder, "__pycache__")):
        assert time.monotonic() < deadline, "the other node has scored nothing in 60 s"
        time.sleep(0.01)
    return {"score": len(solution_str), "parent": os.getppid()}
"""


def main(folder: Path, runtime_env: dict[str, Any]) -> None:
    import ray
    from ray.cluster_utils import Cluster

    (folder / "reward.py").write_text(FUNCTION)
    node = {"num_cpus": 1, "object_store_memory": 128 * 1024**2, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True, head_node_args={**node, "_system_config": {"prestart_worker_first_driver": False}}
    )
    cluster.add_node(**node)
    start_ray(cluster.address, log_to_driver=False, runtime_env=runtime_env)
    spec = FunctionSpec(str(folder / "reward.py"), "who")
    batch = answers(*[("abcdefgh" * 2)[: 1 + row % 9] for row in range(24)])
    with RewardRunner([spec], tiny_tokenizer(), timeout_seconds=90.0) as alone_or_not:
        alone_or_not.use_nodes(most=3)
        assert alone_or_not._pool is not None
        places = alone_or_not._pool._targets
        first = alone_or_not.score(batch).columns
        pending = alone_or_not.submit(batch)
        ray.kill(places[1].pool.actor)  # type: ignore[attr-defined]
        second = pending.result().columns
        left = alone_or_not._pool.calls_at_a_time
    stop_ray()
    cluster.shutdown()
    result: dict[str, Any] = {
        "driver": os.getpid(),
        "parents": sorted({int(parent) for parent in first.non_tensor_batch["parent"]}),
        "texts": first.non_tensor_batch["response_str"].tolist(),
        "first": _scores(first),
        "second": _scores(second),
        "failed": second.tensors["reward_failed"].sum().item(),
        "processes_left": left,
    }
    print(json.dumps(result))


def _scores(columns: DataProto) -> list[float]:
    return columns.tensors["token_level_scores"].sum(-1).tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
