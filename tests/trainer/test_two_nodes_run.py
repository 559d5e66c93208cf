"""A run over two Ray nodes, each in a network namespace of its own: nothing but the wire between them is shared.

Minutes, because it starts a cluster and two runs on it. Cheaper tests put two nodes on one loopback, where a wrong
address, a wrong interface or a folder that is not shared cannot show.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dovetail.checkpoint.store import CheckpointStore
from dovetail.controller.process_state import kill_processes
from dovetail.controller.reaper import TAG, tagged_processes
from tests.trainer.test_faults import ROOT, Run
from tests.trainer.toy_run import Toy
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def _why_not() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and iproute2"
    name = f"dove-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return "" if made.returncode == 0 else f"network namespaces are not allowed here: {made.stderr.strip()}"


@dataclass
class TwoNodes:
    """A Ray cluster of two nodes with one slot each. `private` is a folder that is another one on the second node."""

    namespaces: tuple[str, str]
    addresses: tuple[str, str]
    private: Path
    tag: str

    def train(self, toy: Toy, folder: Path, run: Path, **changes: object) -> Run:
        keys = {
            "trainer.nnodes": 2,
            "trainer.total_training_steps": 500,
            "trainer.save_freq": 1,
            "trainer.max_actor_ckpt_to_keep": 2,
            "ray_init.address": f"{self.addresses[0]}:6379",
        } | changes
        log = folder / "log.txt"
        command = [sys.executable, "-m", "dovetail.cli.main", "train", *toy.arguments(run, keys)]
        with log.open("w") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespaces[0], *command],
                cwd=ROOT, env=_environment(self.tag), stdout=file, stderr=file, text=True,
            )  # fmt: skip
        return Run(process, run, log)

    def worker_of(self, address: str) -> int:
        """The rank's process in the namespace of this node."""
        namespace = Path("/run/netns", self.namespaces[self.addresses.index(address)]).stat().st_ino
        for pid in tagged_processes(self.tag):
            is_worker = Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::WorkerHost")
            if is_worker and Path(f"/proc/{pid}/ns/net").stat().st_ino == namespace:
                return pid
        raise AssertionError(f"no worker on {address}")


def _environment(tag: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Nobody else is on the wire between the two.
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_prestart_worker_first_driver": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    return env | ray | {TAG: tag}


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    if reason := _why_not():
        pytest.skip(reason)
    word, net = secrets.token_hex(3), secrets.randbelow(200) + 20
    names = (f"dove-{word}-a", f"dove-{word}-b")
    nodes = TwoNodes(names, (f"10.{net}.7.1", f"10.{net}.7.2"), tmp_path / "private", f"two-nodes-{word}")
    nodes.private.mkdir()
    try:
        _make_network(names, nodes.addresses, word)
        _start_ray(nodes, tmp_path)
        yield nodes
    finally:
        for _ in range(2):
            kill_processes(tagged_processes(nodes.tag))
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _make_network(names: tuple[str, str], addresses: tuple[str, str], word: str) -> None:
    for name in names:
        _ip("netns", "add", name)
    ends = (f"dv{word}a", f"dv{word}b")
    _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for name, end, address in zip(names, ends, addresses, strict=True):
        _ip("link", "set", end, "netns", name)
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
        for device in (end, "lo"):
            _ip("-n", name, "link", "set", device, "up")


def _start_ray(nodes: TwoNodes, folder: Path) -> None:
    ray = str(Path(sys.executable).parent / "ray")
    common = f"--num-cpus=1 --num-gpus=0 --object-store-memory={2**27} --disable-usage-stats --block"
    first, second = nodes.addresses
    starts = (
        f"exec {ray} start --head --node-ip-address={first} --port=6379 --include-dashboard=false {common}",
        # A folder of the same name, and another one: as on a node without the shared file system.
        f"mount -t tmpfs none {nodes.private} && "
        f"exec {ray} start --address={first}:6379 --node-ip-address={second} {common}",
    )
    for name, start in zip(nodes.namespaces, starts, strict=True):
        log = folder / f"{name}.txt"
        with log.open("w") as file:
            subprocess.Popen(
                ["ip", "netns", "exec", name, "sh", "-c", start],
                env=_environment(nodes.tag), cwd=ROOT, stdout=file, stderr=file,
            )  # fmt: skip
        _until_in(log, "Ray runtime started")


def test_a_run_over_two_nodes_checks_the_folder_trains_and_names_a_stopped_worker_of_the_other_node(
    toy: Toy, tmp_path: Path, two_nodes: TwoNodes
) -> None:
    here, there = two_nodes.addresses
    refused = two_nodes.train(toy, tmp_path, two_nodes.private / "run")
    code, text = refused.ends()
    assert code == 2, text
    assert f"run is not the driver's folder on every node (node {there}: it has no" in text, text
    assert f"node {here}" not in text
    assert "Traceback" not in text

    run = two_nodes.train(toy, tmp_path, tmp_path / "run")
    try:
        run.wait_for(lambda: run.is_in("gen", from_step=3))
        victim = two_nodes.worker_of(there)
        os.kill(victim, signal.SIGSTOP)
        code, text = run.ends()
    finally:
        run.process.kill()
    assert code == 75, text  # a worker hung
    assert re.search(rf"\[rank 1\] hangs \(pid {victim} on node {re.escape(there)}\)", text), text
    latest = CheckpointStore(run.folder).latest()
    assert latest is not None
    assert not Path(f"/proc/{victim}").exists()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def _until_in(file: Path, text: str) -> None:
    wait_until(lambda: text in file.read_text(), f"{text!r} in {file}", seconds=180)
