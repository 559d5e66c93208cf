"""What a worker process finds around it: variables of the driver, a device, a port to meet its peers on."""

from __future__ import annotations

import inspect
import os
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml

from dovetail.config import ConfigError
from dovetail.config.ray_init import RayInitConfig
from dovetail.config.root import DovetailConfig
from dovetail.controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register
from dovetail.controller.context import MissingGpuError, WorkerContext, device_index
from dovetail.controller.forwarding import forwarded_variables, merged_runtime_env, secrets
from dovetail.observability.run_folder import RunFolder
from dovetail.trainer.devices import start_cluster
from tests.programs import run_program
from tests.ray_workers import quick_workers

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("controller")
unit, distributed = pytest.mark.unit, pytest.mark.distributed


class Plain(Worker):
    """Written for verl: it asks torch, not the controller, for a process group."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce(self) -> float:
        torch.distributed.init_process_group(backend="gloo")
        value = torch.tensor([float(self.rank)])
        torch.distributed.all_reduce(value)
        return value.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_as_dovetail_does(self) -> float:
        self.init_process_group()
        value = torch.tensor([1.0])
        torch.distributed.all_reduce(value)
        return value.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


@unit
def test_variables_of_the_driver_are_merged_with_the_users_which_win(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "VLLM_LOGGING_LEVEL", "SGLANG_X", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_TIMEOUT"):
        monkeypatch.setenv(name, "driver")
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "MASTER_PORT", "RANK"):
        monkeypatch.setenv(name, "0")
    merged = merged_runtime_env({"pip": ["x"], "env_vars": {"NCCL_DEBUG": "user", "MINE": "1"}}, {"NCCL_DEBUG": "env"})
    assert merged["pip"] == ["x"]
    env = merged["env_vars"]
    assert (env["NCCL_DEBUG"], env["MINE"]) == ("user", "1")
    assert {env[name] for name in ("VLLM_LOGGING_LEVEL", "SGLANG_X", "PYTORCH_CUDA_ALLOC_CONF")} == {"driver"}
    assert env["TORCH_NCCL_TIMEOUT"] == "driver"
    assert not {"CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "MASTER_PORT", "RANK"} & set(env), "these are per node"


@unit
def test_every_argument_of_ray_init_is_a_key() -> None:
    import ray

    passed_on, parameters = set(RayInitConfig.passed_on), set(inspect.signature(ray.init).parameters)
    assert parameters - {"kwargs"} == passed_on | {"address", "num_cpus", "runtime_env"}


@unit
def test_secrets_stay_out_of_rays_books_and_of_the_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert "HF_TOKEN" not in merged_runtime_env({})["env_vars"]
    assert secrets() == {"HF_TOKEN": "hf_secret"} | {n: v for n, v in secrets().items() if n != "HF_TOKEN"}
    assert "TOKENIZERS_PARALLELISM" not in secrets()
    assert set(secrets()) <= set(forwarded_variables())
    config = DovetailConfig(ray_init={"runtime_env": {"env_vars": {"HF_TOKEN": "hf_users", "MINE": "1"}, "pip": ["x"]}})
    folder = RunFolder(tmp_path)
    folder.write_config(config.model_dump(mode="json"))
    text = (tmp_path / "config.yaml").read_text()
    assert "hf_users" not in text
    assert yaml.safe_load(text)["ray_init"]["runtime_env"] == {"env_vars": {"MINE": "1"}, "pip": ["x"]}
    assert config.ray_init.init_arguments["runtime_env"]["env_vars"]["HF_TOKEN"] == "hf_users", "Ray gets it"


@distributed
def test_a_secret_of_the_driver_reaches_the_workers(pool: RayResourcePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_TEST_TOKEN", "s3cret")  # after Ray has started: no process inherits it
    group = RayWorkerGroup(pool.split(1)[0], RayClassWithInitArgs(Plain), name_prefix="plain")
    try:
        assert group.variable("DOVETAIL_TEST_TOKEN") == ["s3cret"]
    finally:
        group.shutdown()


@distributed
def test_workers_may_call_torchs_init_process_group_with_no_arguments(pool: RayResourcePool) -> None:
    group = RayWorkerGroup(pool.split(2)[0], RayClassWithInitArgs(Plain), name_prefix="plain")
    try:
        assert group.reduce() == [1.0, 1.0]
        assert group.reduce_as_dovetail_does() == [2.0, 2.0], "the group that is there is used"
    finally:
        group.shutdown()


@unit
@pytest.mark.parametrize(("count", "local_rank", "index"), [(1, 3, 0), (8, 3, 3)])
def test_the_device_is_the_one_that_is_seen(
    count: int, local_rank: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_gpus(monkeypatch, count)
    context = WorkerContext(local_rank=local_rank, needs_gpu=True)
    assert device_index(context) == index
    env = context.env(device_index(context))
    assert (env["LOCAL_RANK"], env["RAY_LOCAL_RANK"]) == (str(index), str(local_rank))


@unit
def test_a_rank_on_the_cpu_keeps_its_rank_on_the_node() -> None:
    context = WorkerContext(local_rank=3, use_gpu=False)
    assert device_index(context) is None
    assert context.env(None)["LOCAL_RANK"] == "3"


@unit
def test_a_worker_that_was_promised_a_gpu_never_falls_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_gpus(monkeypatch, 0)
    with pytest.raises(MissingGpuError, match=r"actor\[rank 5\] on node 10.0.0.7 was promised a GPU and sees none"):
        device_index(WorkerContext(role="actor", rank=5, node="10.0.0.7", needs_gpu=True))
    assert device_index(WorkerContext(use_gpu=True)) is None, "permitted, not promised"


@distributed
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU that Ray is told of must not exist")
def test_a_gpu_that_only_ray_believes_in_stops_the_group_by_name() -> None:
    program = (
        "from dovetail.controller import *\n"
        f"start_ray(num_cpus=2, num_gpus=1, object_store_memory=2**27, runtime_env={quick_workers()})\n"
        "from tests.controller.test_devices_and_environment import Plain\n"
        "try:\n"
        "    RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Plain), name_prefix='actor')\n"
        "except WorkerError as error:\n"
        "    print('REFUSED', str(error).splitlines()[0])\n"
        "stop_ray()\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = run_program([sys.executable, "-c", program], cwd=ROOT, env=env, timeout=180)
    assert "REFUSED actor[rank 0].__init__ failed" in done.stdout, done.stdout
    assert "was promised a GPU and sees none" in done.stdout


@unit
@pytest.mark.parametrize("key", ["trainer", "rollout"])
def test_two_nodes_without_a_cluster_are_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_ray(monkeypatch)
    rollout = {"nnodes": 2, "n_gpus_per_node": 1} if key == "rollout" else {}
    config = DovetailConfig(
        trainer={"nnodes": 2 if key == "trainer" else 1, "n_gpus_per_node": 1, "device": "cpu"},
        actor_rollout_ref={"rollout": rollout},
    )
    words = rf"{key}.nnodes=2 needs a Ray cluster.*ray start --head.*ray_init.address.*ray get-auth-token --generate"
    with pytest.raises(ConfigError, match=words):
        start_cluster(config)


@unit
def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_ray(monkeypatch)
    _fake_gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda, but this machine shows no GPU"):
        start_cluster(DovetailConfig(trainer={"device": "cuda", "n_gpus_per_node": 1}))


@unit
def test_a_local_ray_is_told_of_the_gpus_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_ray(monkeypatch)
    _fake_gpus(monkeypatch, 4)
    told: dict[str, object] = {}
    monkeypatch.setattr("dovetail.trainer.devices.start_ray", lambda **arguments: told.update(arguments))
    assert start_cluster(DovetailConfig(trainer={"n_gpus_per_node": 2}))
    assert (told["num_gpus"], told["num_cpus"]) == (4, 4)
    with pytest.raises(ConfigError, match=r"needs 8 GPUs .* but this machine shows 4"):
        start_cluster(DovetailConfig(trainer={"n_gpus_per_node": 8}))


@unit
def test_a_replay_needs_no_devices_for_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_ray(monkeypatch)
    _fake_gpus(monkeypatch, 4)
    monkeypatch.setattr("dovetail.trainer.devices.start_ray", lambda **arguments: None)
    apart = {"hybrid_engine": False, "rollout": {"nnodes": 2, "n_gpus_per_node": 4}}
    config = DovetailConfig(trainer={"n_gpus_per_node": 4}, actor_rollout_ref=apart)
    with pytest.raises(ConfigError, match=r"rollout\.nnodes=2 needs a Ray cluster"):
        start_cluster(config)
    assert start_cluster(config, generates=False)
    _fake_gpus(monkeypatch, 3)
    with pytest.raises(ConfigError, match=r"needs 4 GPUs .* 0 for engines alone"):
        start_cluster(config, generates=False)


@unit
def test_a_head_node_without_a_gpu_does_not_make_the_cluster_a_cpu_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = types.ModuleType("ray")
    monkeypatch.setitem(sys.modules, "ray", ray)
    _fake_gpus(monkeypatch, 0)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("dovetail.trainer.devices.start_ray", lambda **arguments: None)
    auto = DovetailConfig(trainer={"nnodes": 2, "n_gpus_per_node": 4})
    ray.cluster_resources = lambda: {"CPU": 8.0, "GPU": 8.0}
    assert start_cluster(auto)
    ray.cluster_resources = lambda: {"CPU": 8.0}
    assert not start_cluster(auto)
    with pytest.raises(ConfigError, match=r"needs 8 GPUs .* but the cluster has 0"):
        start_cluster(DovetailConfig(trainer={"nnodes": 2, "n_gpus_per_node": 4, "device": "cuda"}))


def _fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("dovetail.trainer.devices.ray_runs_here", lambda: False)
