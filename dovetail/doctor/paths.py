"""The paths that `dovetail doctor --cluster` tests, each run for real in worker processes of its own.

`python -m dovetail.doctor.paths SITE.json NAME ...` runs them until one fails; `dovetail.doctor.cluster` starts it. A
path returns what it saw in words and raises where something is wrong.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.config.effects import refuse_unsupported
from dovetail.config.errors import ConfigError
from dovetail.doctor.site import Site
from dovetail.observability.disk import replacing

if TYPE_CHECKING:
    from dovetail.doctor.same_update import Update

Stage = Callable[[str], None]
R, A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


class Mismatch(RuntimeError):
    """The path ran and its numbers are wrong."""


@dataclass(frozen=True)
class DoctorPath:
    """A path: its name, what it shows, how it is run, and the devices and the library that it needs."""

    name: str
    shows: str
    run: Callable[[Site, Stage], str]
    devices: int = 1
    library: str = ""

    def missing(self, site: Site) -> str:
        """What it would need to be tried here; empty where it can be."""
        # SGLang's servers may run under a Python of their own, which this variable names.
        apart = self.library == "sglang" and "DOVETAIL_SGLANG_PYTHON" in os.environ
        if self.library and not apart and importlib.util.find_spec(self.library) is None:
            return f"{self.library} is not installed"
        return "" if site.num_devices >= self.devices else f"needs {self.devices} devices, there is {site.num_devices}"


def nodes(site: Site, stage: Stage) -> str:
    """Every node runs the same Python, torch and dovetail, and sees the shared folder."""
    from dovetail.doctor.site import node_facts

    _start(site, stage)
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    facts = {}
    for node in (node for node in ray.nodes() if node["Alive"]):
        stage(f"ask node {node['NodeManagerAddress']}")
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(node_facts).options(scheduling_strategy=here, num_cpus=0)
        facts[node["NodeManagerAddress"]] = ray.get(task.remote(str(site.folder)), timeout=120)
    first = next(iter(facts.values()))
    for address, other in facts.items():
        if not other["sees_folder"]:
            raise Mismatch(
                f"node {address} does not see {site.folder}; run folders must be on storage that all nodes mount. "
                "Give one with --work DIR."
            )
        different = [
            f"{key} {other[key]} where the first node has {first[key]}" for key in first if other[key] != first[key]
        ]
        if different:
            raise Mismatch(f"node {address} has {', '.join(different)}; install the same versions on all nodes.")
    gpus = ray.cluster_resources().get("GPU", 0)
    versions = ", ".join(f"{key} {value}" for key, value in first.items() if key != "sees_folder")
    return f"{len(facts)} node{'s' * (len(facts) > 1)}, {gpus:g} GPUs; everywhere {versions}"


def collectives(site: Site, stage: Stage) -> str:
    """All-reduce and broadcast over all ranks, and each pair of ranks, with checked contents."""
    from dovetail.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from dovetail.doctor.collectives import CollectivesWorker

    _start(site, stage)
    stage(f"all-reduce, broadcast and pairs of {site.num_devices} ranks")
    pool = RayResourcePool([site.devices_per_node] * site.num_nodes, use_gpu=site.on_cuda)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(CollectivesWorker))
    megabytes = 256 if site.on_cuda else 64
    try:
        seen = group.measure(megabytes * 1024**2)
    finally:
        group.release()
    if site.num_devices == 1:
        return "one rank: a group was built; there is no link to measure"
    first = seen[0]
    words = f"{megabytes} MiB: all-reduce {first.all_reduce:.2g} GB/s (bus), broadcast {first.broadcast:.2g} GB/s"
    if first.slowest is not None:
        (one, other), rate = first.slowest
        words += f"; slowest pair: ranks {one} ({seen[one].host}) and {other} ({seen[other].host}), {rate:.2g} GB/s"
    return words


def trained_with(name: str, *changes: str, needs: int = 2, library: str = "") -> DoctorPath:
    """One update on all devices, held against the same update in one process."""

    def run(site: Site, stage: Stage) -> str:
        from dovetail.doctor.same_update import TOLERANCE, overrides, update_once

        rows = max(8, 2 * site.num_devices)
        _start(site, stage)
        stage(f"one update on {site.num_devices} devices")
        many = update_once(site.config(*overrides(rows), *changes), use_ray=True, use_gpu=site.on_cuda)
        stage("the same update in one process")
        one = _update_of_one(site, rows)
        if not one.moved > 10 * TOLERANCE:
            raise Mismatch(f"the update moved log-probs by {one.moved:.2g} only, too little to tell a wrong one.")
        if not (distance := many.difference(one)) <= 1:
            raise Mismatch(
                f"the update differs from that of one process by {distance * TOLERANCE:.2g} (allowed {TOLERANCE:g}): "
                f"gradient norm {many.grad_norm:.6g} against {one.grad_norm:.6g}."
            )
        return (
            f"gradient norm {many.grad_norm:.6g}, one process {one.grad_norm:.6g}; log-probs moved by {one.moved:.2g}"
        )

    return DoctorPath(name, "one update = the update of one process", run, needs, library)


def generated_with(name: str, *changes: str, needs: int = 1, library: str = "", apart: bool = False) -> DoctorPath:
    """Train one step, bring the weights to the engine with checksums, compare log-probs of engine and trainer."""

    def run(site: Site, stage: Stage) -> str:
        from dovetail.doctor.agreement import OVERRIDES, examine
        from dovetail.trainer.groups import create_groups

        own: tuple[str, ...] = ()
        devices = None
        if apart:  # half of the devices train, the others generate
            each = max(1, site.num_devices // 2)
            own = ("actor_rollout_ref.hybrid_engine=False", f"{R}.nnodes=1", f"{R}.n_gpus_per_node={each}")
            devices = each
        check = [line for line in OVERRIDES if "verify_weights" not in line]
        if library and site.on_cuda:
            # vLLM and SGLang multiply float32 in TF32 there; this asks for TF32's pass mark.
            check.append("trainer.float32_matmul_precision=high")
        config = site.config(*check, f"{R}.verify_weights=True", *own, *changes, devices=devices)
        refuse_unsupported(config)
        _start(site, stage)
        stage("start the processes")
        groups = create_groups(config, use_ray=True, use_gpu=site.on_cuda)
        try:
            seen = examine(config, groups, on_stage=stage)
        finally:
            groups.shutdown()
        if not seen.passed:
            wrong = next((report for report in (seen.before, seen.after) if not report.passed), None)
            why = wrong.explain(config.actor_rollout_ref.rollout.name) if wrong else "sampled log-probs differ"
            raise Mismatch(f"{why} (mean {seen.sampled.mean:.2g}, largest {seen.sampled.largest:.2g})")
        return (
            f"log-probs of {seen.sampled.diffs.numel()} tokens within {seen.sampled.largest:.1g} of the trainer's; "
            f"old weights would be off by {seen.sampled.moved:.1g}"
        )

    return DoctorPath(name, "checksums, and engine = trainer after a step", run, needs, library)


def two_steps(site: Site, stage: Stage) -> str:
    """A whole run: data, generation, rewards, update, checkpoint."""
    from dovetail.controller import stop_ray
    from dovetail.doctor.whole_run import finished_run

    stop_ray()  # the runs have one of their own
    stage("two steps")
    rows = finished_run(site, site.folder / "two-steps")
    return f"2 steps, reward {rows[-1]['critic/score/mean']:.3f}, checkpoint written"


def kill_and_resume(site: Site, stage: Stage) -> str:
    """A run killed after its first checkpoint goes on as if it had not been."""
    from dovetail.controller import stop_ray
    from dovetail.doctor.whole_run import finished_run, killed_run

    stop_ray()  # the runs have one of their own
    stage("two steps without a break")
    expected = finished_run(site, site.folder / "two-steps")
    stage("kill after the first checkpoint")
    killed_run(site, site.folder / "killed")
    stage("resume")
    resumed = finished_run(site, site.folder / "killed")
    for name in ("critic/score/mean", "actor/grad_norm"):
        last, wanted = resumed[-1][name], expected[-1][name]
        # To the bit on a CPU; kernels of a GPU may add in another order.
        if abs(last - wanted) > (1e-3 * abs(wanted) if site.on_cuda else 0.0):
            raise Mismatch(f"step 2 after the resume has {name} {last!r}; without the kill it is {wanted!r}.")
    return f"killed after step 1, resumed; gradient norm of step 2 {resumed[-1]['actor/grad_norm']:.6g} both times"


MEGATRON = (f"{A}.strategy=megatron",)
TENSOR_2 = f"{R}.tensor_model_parallel_size=2"
PATHS: tuple[DoctorPath, ...] = (
    DoctorPath("nodes", "same versions, one shared folder", nodes),
    DoctorPath("collectives", "bandwidth, and right numbers", collectives),
    trained_with("fsdp2", f"{A}.strategy=fsdp2"),
    trained_with("fsdp", f"{A}.strategy=fsdp"),
    trained_with("fsdp2, ulysses 2", f"{A}.strategy=fsdp2", f"{A}.ulysses_sequence_parallel_size=2"),
    trained_with("megatron", *MEGATRON, needs=1, library="megatron"),
    trained_with("megatron, tensor 2", *MEGATRON, f"{A}.megatron.tensor_model_parallel_size=2", library="megatron"),
    trained_with("megatron, pipeline 2", *MEGATRON, f"{A}.megatron.pipeline_model_parallel_size=2", library="megatron"),
    generated_with("native engine"),
    generated_with("native engine, own devices", needs=2, apart=True),
    generated_with("vllm, tensor 1", f"{R}.name=vllm", library="vllm"),
    generated_with("vllm, tensor 2", f"{R}.name=vllm", TENSOR_2, needs=2, library="vllm"),
    generated_with("vllm, own devices", f"{R}.name=vllm", needs=2, library="vllm", apart=True),
    generated_with("sglang, tensor 1", f"{R}.name=sglang", library="sglang"),
    generated_with("sglang, tensor 2", f"{R}.name=sglang", TENSOR_2, needs=2, library="sglang"),
    generated_with("sglang, own devices", f"{R}.name=sglang", needs=2, library="sglang", apart=True),
    DoctorPath("two-step run", "data, rewards, update, checkpoint", two_steps),
    DoctorPath("kill and resume", "a killed run goes on as if it had not been", kill_and_resume),
)


@functools.cache
def _update_of_one(site: Site, rows: int) -> Update:
    """What the update on many devices is held against. Paths that share the process share it."""
    from dovetail.doctor.same_update import overrides, update_once

    return update_once(site.config(*overrides(rows), devices=1), use_ray=False, use_gpu=site.on_cuda)


def _start(site: Site, stage: Stage) -> None:
    """Ray stays for the paths that follow."""
    from dovetail.trainer.devices import start_cluster

    stage("start Ray")
    # Room for engines beside the trainer: slots of a local Ray are processes, not cores.
    start_cluster(site.config())


def main(site_file: str, *names: str) -> int:
    """Run paths until one fails."""
    site = Site.from_json(json.loads(Path(site_file).read_text()))
    paths = {path.name: path for path in PATHS}
    return 0 if all(run_path(site, paths[name]) for name in names) else 1


def run_path(site: Site, path: DoctorPath) -> bool:
    """Run one path and write `{verdict, seen, traceback}`; the last line of its `.stage` file says what it is at."""
    file = site.folder / f"{file_name(path.name)}.json"
    stages = file.with_suffix(".stage")
    try:
        with file.with_suffix(".stacks").open("w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            try:
                report = {"verdict": "ok", "seen": path.run(site, lambda words: _append(stages, words))}
            finally:
                faulthandler.unregister(signal.SIGUSR1)
    except ConfigError as refusal:
        report = {"verdict": "refused", "seen": " ".join(str(problem) for problem in refusal.problems)}
    except Exception as error:  # noqa: BLE001  the process boundary: the parent shows it
        report = {"verdict": "FAILED", "seen": _headline(error), "traceback": traceback.format_exc()}
    with replacing(file) as partial:  # the parent never sees half a report
        partial.write_text(json.dumps(report))
    return report["verdict"] != "FAILED"


def file_name(path_name: str) -> str:
    """What the files of a path are called, without a suffix."""
    return f"path-{path_name.replace(', ', '-').replace(' ', '-')}"


def _headline(error: BaseException) -> str:
    """The first line of an error; for one that Ray brought from another process, of the error there."""
    cause = getattr(error, "cause", None)
    error = cause if isinstance(cause, BaseException) else error
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _append(file: Path, words: str) -> None:
    with file.open("a") as out:
        out.write(f"{words}\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
