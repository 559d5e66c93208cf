"""docs/metrics.md explains every metric that the package names; `toy_run.train` looks at those that runs write."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.glossary import known_metrics, unexplained

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).parents[2] / "dovetail"
WRITERS = ("algorithms", "backends", "models", "rewards", "trainer", "workers")
AREAS = {pattern.pattern.partition("/")[0].replace("\\", "") for pattern in known_metrics()}
INSIDE = ("rollout_corr/ratio_mean", "rollout_corr/ratio_square_mean")
"""Sums of the workers, from which a metric is made."""
_METRIC = re.compile(r"[a-z_-]+(/[\w@*.-]+)+")


def _named() -> Iterator[tuple[str, str]]:
    """Texts of the source that look like a metric of a known area; what an f-string fills in is `x`."""
    for file in (file for folder in WRITERS for file in (PACKAGE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else "x" for p in parts)
            if _METRIC.fullmatch(text) and text.partition("/")[0] in AREAS:
                yield text, file.name


def test_every_metric_that_the_source_names_is_explained() -> None:
    named = dict(_named())
    assert {"actor/pg_loss", "critic/vf_loss", "perf/throughput", "async/staleness/mean"} <= set(named)
    # Some are the beginning of several: `critic/score` of /mean, `async/staleness/lag_` of lag_0.
    missing = [name for name in named if len(unexplained([name, f"{name}/mean", f"{name}0"])) == 3]
    missing = [name for name in missing if not name.endswith("/x") and name not in INSIDE]
    assert not missing, f"docs/metrics.md does not explain {[(name, named[name]) for name in missing]}"


def test_what_is_not_on_the_page_is_found() -> None:
    assert unexplained(["step", "actor/lr", "reward/acc/mean", "val-core/a/b/acc/mean@4"]) == []
    assert unexplained(["actor/lr2", "loss"]) == ["actor/lr2", "loss"]
