"""Each rule speaks when its trouble is there, and is silent in a healthy run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.dashboard.health import RULE_TITLES, RULES, Facts, check_health
from dovetail.dashboard.run_files import MetricsTable
from tests.dashboard.synthetic import line, metrics_row

pytestmark = pytest.mark.unit

Change = Callable[[int, dict[str, Any]], dict[str, Any]]
STEPS = 60


def table_of(folder: Path, change: Change) -> MetricsTable:
    rows = [metrics_row(step, STEPS) for step in range(1, STEPS + 1)]
    # The synthetic curve of the gap is above the bound at times.
    rows = [row | {"rollout_corr/k3_kl": 1e-4} | change(row["step"], row) for row in rows]
    (folder / "metrics.jsonl").write_text("".join(line(row) for row in rows))
    table = MetricsTable(folder / "metrics.jsonl")
    table.refresh()
    return table


def late(step: int, value: Any, usual: Any) -> Any:
    return value if step > STEPS - 15 else usual


TROUBLES: dict[str, Change] = {
    "entropy_collapse": lambda step, row: {"actor/entropy": late(step, 0.05, 1.5)},
    "no_variance": lambda step, row: {
        "critic/score/max": late(step, 0.0, 1.0),
        "critic/score/mean": 0.0,
    },
    "mismatch": lambda step, row: {"rollout_corr/k3_kl": late(step, 0.05, 1e-4)},
    "truncation": lambda step, row: {"response_length/clip_ratio": late(step, 0.6, 0.05)},
    "rewards_failing": lambda step, row: {"reward/failed_share": late(step, 0.05, 0.0)},
    "not_finite": lambda step, row: {"actor/pg_loss": None if step == 30 else 0.1},
    "grad_spike": lambda step, row: {"actor/grad_norm": 50.0 if step == STEPS - 3 else 1.0},
    "clipping": lambda step, row: {"actor/pg_clipfrac": late(step, 0.5, 0.01)},
    "policy_jump": lambda step, row: {"actor/ppo_kl": late(step, 0.4, 0.001)},
    "reward_falls": lambda step, row: {"critic/score/mean": late(step, 0.2, row["critic/score/mean"])},
    "hacking": lambda step, row: {"val-core/toy/acc/mean@1": late(step, 0.2, 0.5)} if step % 10 == 0 else {},
    "val_truncation": lambda step, row: (
        {"val-core/toy/acc/mean@1": late(step, 0.2, 0.5), "val-aux/response_length/clip_ratio": late(step, 0.4, 0.05)}
        if step % 10 == 0
        else {}
    ),
    "one_phase": lambda step, row: {"timing_s/gen": 50.0, "timing_s/step": 52.2},
}


@pytest.mark.parametrize("rule", TROUBLES)
def test_a_rule_finds_its_trouble_and_no_other(rule: str, tmp_path: Path) -> None:
    found = check_health(Facts(table_of(tmp_path, TROUBLES[rule])))
    assert [warning["rule"] for warning in found] == [rule]
    assert all(len(found[0][part]) > 10 for part in ("title", "evidence", "what_to_try"))


def test_a_healthy_run_has_no_warning(tmp_path: Path) -> None:
    assert check_health(Facts(table_of(tmp_path, lambda step, row: {}), no_signal=0.25)) == []
    assert len(RULES) == len(RULE_TITLES)


def test_groups_without_signal_full_memory_and_a_dead_process_are_found(tmp_path: Path) -> None:
    memory = {"device_gib": 80.0, "phases": [{"name": "update actor", "measured": 79.0}]}
    table = table_of(tmp_path, lambda step, row: {"critic/score/mean": 0.5 * row["critic/score/mean"]})
    facts = Facts(table, no_signal=0.95, memory=memory, stopped="gone")
    assert {warning["rule"] for warning in check_health(facts)} == {"stopped", "no_signal", "memory_full"}


@pytest.mark.parametrize("no_signal", [0.95, None])
def test_a_run_that_solves_its_prompts_is_told_so_and_not_that_its_reward_is_broken(
    no_signal: float | None, tmp_path: Path
) -> None:
    table = table_of(
        tmp_path, lambda step, row: late(step, {f"critic/score/{name}": 1.0 for name in ("mean", "min")}, {})
    )
    [warning] = check_health(Facts(table, no_signal=no_signal))
    assert (warning["rule"], warning["severity"]) == ("solved", "warn")


def test_a_run_of_no_steps_has_no_warning(tmp_path: Path) -> None:
    assert check_health(Facts(MetricsTable(tmp_path / "nothing.jsonl"))) == []
