"""SIGKILL at random moments of asynchronous runs: no prompt is lost, none trained twice, and the run reaches its end.

A moment is a number of file operations in the run folder (lines of the ledger and of the metrics, phases, checkpoints
in all their parts), plus a delay that reaches into the generation or the update after it. The process that makes them,
the driver, kills itself, a rank of the trainer or an engine. Then the same command goes on, until no kill comes.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

import tests.ranks  # noqa: F401  the fork server has torch and the models imported then
from dovetail.cli.main import main
from dovetail.observability.ledger import read_ledger
from dovetail.observability.run_folder import DRAWS, RunFolder
from dovetail.trainer.dapo import RayDAPOTrainer
from dovetail.trainer.run import run_training
from tests.programs import exit_code
from tests.trainer.test_async_engines import APART
from tests.trainer.toy_run import DAPO, Toy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

Victim = Literal["driver", "trainer", "engine"]
STEPS = 6
CARRYING: dict[str, Any] = {
    "async_training.mode": "fully_async",
    "async_training.max_staleness": 2,
    "async_training.stall_timeout_s": 60,
    "actor_rollout_ref.rollout.max_num_seqs": 6,
    "trainer.total_training_steps": STEPS,
    "trainer.save_freq": 2,
    "trainer.max_actor_ckpt_to_keep": 2,
}
ENGINES = {
    **APART,
    **CARRYING,
    "actor_rollout_ref.rollout.restart_engine": 3,
    "data.max_response_length": 48,
}
MODES: dict[str, dict[str, Any]] = {
    "wait": CARRYING,
    "mask": {**CARRYING, "async_training.on_stale": "mask", "trainer.save_freq": 1},
    "drop": {**CARRYING, "async_training.on_stale": "drop", "trainer.save_freq": 3},
    "order of draws": {**CARRYING, "async_training.order": "draw"},
    "dynamic sampling": {**CARRYING, **DAPO},
}
ON_RAY: dict[str, dict[str, Any]] = {
    "fully_async": ENGINES,
    "one_step_off": {**ENGINES, "async_training.mode": "one_step_off", "async_training.max_staleness": 1},
}
CODES = {None: (0,), "driver": (-signal.SIGKILL,), "trainer": (0, 1), "engine": (0,)}
"""Exit codes by who was killed: the death of an engine is survived; that of a rank is too late in a run that ends."""
_MOST_EVENTS = 500
"""About as many file operations as a run of six steps makes in its folder."""


@dataclass(frozen=True)
class Kill:
    """Of `victim`, `delay` seconds after the driver's `event`-th operation on a file of the run folder."""

    event: int
    delay: float
    victim: Victim = "driver"


class Watched(RayDAPOTrainer):
    """Says which processes there are."""

    running: Watched | None = None

    def init_workers(self) -> None:
        type(self).running = self
        super().init_workers()

    def pid(self, victim: Victim) -> int:
        groups: Any = self._groups
        if victim == "driver" or groups is None:
            return os.getpid()
        return (groups.processes if victim == "trainer" else groups.engines.group).identities[0].pid


def _train(toy: Toy, folder: Path, changes: Mapping[str, Any], kill: Kill | None, use_ray: bool) -> None:
    import torch

    torch.set_num_threads(1)
    if kill is not None:
        _arm(folder, kill)
    run_training(toy.config(folder, changes), trainer_class=Watched, use_ray=use_ray)


def _arm(folder: Path, kill: Kill) -> None:
    """Kill when so many files of the folder have been opened, renamed or removed (Python's audit events)."""
    left, prefix, due = [kill.event], f"{folder}/", threading.Event()
    at_once = kill.victim == "driver" and not kill.delay

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.mkdir") or due.is_set():
            return
        if str(arguments[0]).startswith(prefix):
            left[0] -= 1
            if left[0] <= 0:
                due.set()
                if at_once:
                    die()

    def die() -> None:
        victim = os.getpid() if Watched.running is None else Watched.running.pid(kill.victim)
        if victim == os.getpid():
            kill_file(folder).write_text("driver")
        os.kill(victim, signal.SIGKILL)  # an error where it is gone already: no kill
        kill_file(folder).write_text(kill.victim)

    def wait() -> None:
        due.wait()
        threading.Event().wait(kill.delay)
        die()

    if not at_once:
        threading.Thread(target=wait, daemon=True).start()
    sys.addaudithook(note)


def kill_file(folder: Path) -> Path:
    """Beside the run folder: who was killed, once the kill has come."""
    return folder.with_name("killed")


def run(toy: Toy, folder: Path, changes: Mapping[str, Any], kill: Kill | None, *, use_ray: bool) -> int:
    """The exit code of a run; -9 when the driver was killed."""
    process = mp.get_context("forkserver").Process(target=_train, args=(toy, folder, changes, kill, use_ray))
    return exit_code(process, 900, lambda: f"a run that does not die; {kill}")


def killed_again_and_again(
    toy: Toy, folder: Path, changes: Mapping[str, Any], seed: str, kills: int, *, use_ray: bool
) -> list[tuple[Kill, int]]:
    """`kills` times, with an audit after each; returns what came of each. A run that ends is followed by another."""
    rng = random.Random(seed)
    victims: tuple[Victim, ...] = ("driver", "trainer", "engine") if use_ray else ("driver",)
    outcomes: list[tuple[Kill, int]] = []
    number = 0
    while len(outcomes) < kills:
        delay = rng.choice([0.0, rng.uniform(0, 0.2)])
        kill = Kill(rng.randint(1, _MOST_EVENTS // 2), delay, rng.choice(victims))
        here = folder / f"run_{number}"
        code = run(toy, here, changes, kill, use_ray=use_ray)
        killed = kill_file(here).read_text() if kill_file(here).exists() else None
        if killed is not None:
            outcomes.append((kill, code))
            kill_file(here).unlink()
        assert code in CODES[killed], f"seed {seed}: exit code {code} after the kill of {killed}; {outcomes}"
        assert not (here / DRAWS).exists() or main(["audit", str(here)]) == 0, f"seed {seed}: {outcomes}"
        if code == 0:
            check_finished(here, changes, f"seed {seed}: {outcomes}")
            number += 1
    here = folder / f"run_{number}"
    assert run(toy, here, changes, None, use_ray=use_ray) == 0, f"seed {seed}: {outcomes}"
    check_finished(here, changes, f"seed {seed}: {outcomes}")
    return outcomes


def check_finished(folder: Path, changes: Mapping[str, Any], said: str) -> None:
    """Every step once, every draw at most once and within the bound; where none may be dropped, every draw trained."""
    assert main(["audit", str(folder)]) == 0, said
    ledger = read_ledger(folder)
    assert ledger is not None
    counts = ledger.counts()
    assert [row["step"] for row in RunFolder(folder).read_metrics()] == list(range(1, STEPS + 1)), said
    assert counts["trained"] == STEPS * 4, f"{counts}; {said}"
    if changes.get("async_training.on_stale", "wait") == "wait" and "algorithm.filter_groups.enable" not in changes:
        assert counts == {"trained": STEPS * 4}, f"{counts}; {said}"


def test_a_run_that_is_killed_at_random_moments_loses_no_prompt(toy: Toy, tmp_path: Path) -> None:
    """Four starts of a process, or a few more, because only a real kill leaves what a kill leaves."""
    seed = str(random.SystemRandom().randrange(10**6))
    killed_again_and_again(toy, tmp_path, CARRYING, seed, 3, use_ray=False)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("mode", MODES)
def test_150_kills_of_the_only_process(toy: Toy, tmp_path: Path, mode: str, number: int) -> None:
    killed_again_and_again(toy, tmp_path, MODES[mode], f"{mode} {number}", 6, use_ray=False)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("mode", ON_RAY)
def test_50_kills_of_driver_trainer_and_engine(toy: Toy, tmp_path: Path, mode: str, number: int) -> None:
    killed_again_and_again(toy, tmp_path, ON_RAY[mode], f"{mode} {number}", 5, use_ray=True)
