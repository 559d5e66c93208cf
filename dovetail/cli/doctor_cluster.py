"""`dovetail doctor --cluster`: find the devices, run every path on them, show one table, write one report."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.config.errors import ConfigError
from dovetail.config.installed import core_versions
from dovetail.config.load import load_config
from dovetail.doctor.cluster import PathResult, run_paths, select, write_report
from dovetail.doctor.machine import machine
from dovetail.doctor.site import Site, prepare

if TYPE_CHECKING:
    from dovetail.cli.show_doctor import DoctorView

_CPU_PROCESSES = 2


def run_cluster(args: argparse.Namespace, view: DoctorView) -> int:
    """Exit code 0: nothing failed or hung. Paths that need what is not here are said to be untested."""
    try:
        names = select(args.paths)
    except ValueError as error:
        view.problems("Nothing was run", [str(error)])
        return 1
    try:
        load_config([], args.items)
    except ConfigError as error:
        view.problems("The configuration cannot be read", [str(problem) for problem in error.problems])
        return 1
    rows = machine()
    view.machine(rows, core_versions())
    with ExitStack() as open_things:
        if args.work is None:
            folder = Path(open_things.enter_context(tempfile.TemporaryDirectory(prefix="dovetail-doctor-")))
        elif args.work.exists() and any(args.work.iterdir()):
            view.problems("Nothing was run", [f"--work {args.work} is not empty; give a new folder."])
            return 1
        else:
            folder = args.work.resolve()
            folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
        site = _site(folder, args)
        view.note(f"{site.num_nodes} x {site.devices_per_node} {site.device} devices, {len(names)} paths")
        results = _run(site, names, args, view, rows)
    view.note(f"{_counted(results)}; the details are in {args.out}")
    return view.verdict(not any(result.failed for result in results), args.svg)


def _run(
    site: Site, names: list[str], args: argparse.Namespace, view: DoctorView, rows: list[tuple[str, str]]
) -> list[PathResult]:
    """Every verdict is shown and in the report as soon as it is known: whoever stops the command keeps them."""
    results: list[PathResult] = []
    write_report(args.out, site, rows, results)  # fails now, if it cannot be written, and not after some minutes
    with view.paths() as show:
        show.begin(names[0])
        for result in run_paths(site, names, timeout_s=args.limit):
            results.append(result)
            write_report(args.out, site, rows, results)
            show.finish(result)
            if len(results) < len(names):
                show.begin(names[len(results)])
    return results


def _counted(results: list[PathResult]) -> str:
    counts = Counter(result.verdict for result in results)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _site(folder: Path, args: argparse.Namespace) -> Site:
    """All GPUs of this machine or of the Ray cluster; two processes where there is none or the CPU is asked for."""
    overrides = tuple(args.items)
    address = next((item.partition("=")[2] for item in overrides if item.startswith("ray_init.address=")), None)
    gpus = _gpus_by_node(address or os.environ.get("RAY_ADDRESS"))
    if not any(gpus) or "trainer.device=cpu" in overrides:
        return Site(folder, "cpu", max(1, len(gpus)), args.devices or _CPU_PROCESSES, overrides)
    # Nodes without a GPU (a head node) take no part; groups are as large on each node as on the smallest.
    each = [count for count in gpus if count]
    return Site(folder, "cuda", len(each), args.devices or min(each), overrides)


def _gpus_by_node(address: str | None) -> list[int]:
    if address is None:
        import torch

        return [torch.cuda.device_count()]
    from dovetail.controller import start_ray, stop_ray

    start_ray(address)
    try:
        import ray

        return [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    finally:
        stop_ray()
