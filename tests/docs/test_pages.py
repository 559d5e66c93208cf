"""Pages name keys and metrics that exist, explain each metric and algorithm, and say what the schema says."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.algorithms.offline import preference_loss_names
from dovetail.config import DovetailConfig
from dovetail.config.keys import catalogue, find_key, sections
from dovetail.config.names import ADV_ESTIMATORS, POLICY_LOSSES
from tests.docs.blocks import blocks_of
from tests.docs.glossary import known_metrics, unexplained
from tools.configuration_page import document, main

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
# `configuration.md` is made from the keys themselves, and lists those of other systems.
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "configuration.md"})]
SECTIONS = sections(DovetailConfig)
SHORT = {name: f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout", "ref")}
SHORT["rollout_correction"] = "algorithm.rollout_correction"
# A column of the data and a file.
NO_KEYS = {"reward_model.ground_truth", "trainer.json"}
# Keys that only verl has, on the page for its users.
NO_KEYS |= {"trainer.use_v1", "trainer.v1.trainer_mode", "data.output_path"}
_FIRST_CELL = re.compile(r"^\|[^|]*\|", re.MULTILINE)
_DOTTED = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z_0-9]+)+)(?=$|[=\s,)\]*.])")


def wrong_keys(text: str) -> list[str]:
    named = [name for code in re.findall(r"`([^`\n]+)`", text) for name in _DOTTED.findall(code)]
    return [name for name in named if name not in NO_KEYS and not name.endswith(".py") and not _is_key(name)]


def _is_key(name: str) -> bool:
    first, _, rest = name.partition(".")
    full = f"{SHORT.get(first, first)}.{rest}"
    return first not in {*SECTIONS, *SHORT} or full in SECTIONS or find_key(DovetailConfig, full) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_key_in_the_text_of_the_page_is_one(page: Path) -> None:
    text = page.read_text()
    # Tables for users of another library begin with its names.
    assert wrong_keys(_FIRST_CELL.sub("|", text) if page.stem.startswith("from-") else text) == []


def test_a_wrong_key_is_found() -> None:
    text = "Set `reward_model.timout` or `rollout.temprature=1`; `actor.optim.lr`, `rollout.val_kwargs` are right."
    assert wrong_keys(text) == ["reward_model.timout", "rollout.temprature"]


def test_no_page_and_no_hint_of_the_dashboard_asks_for_a_key_without_effect() -> None:
    names = [
        key.name.removeprefix("actor_rollout_ref.")
        for key in catalogue(DovetailConfig).values()
        if any(rule.outcome == "unused" and rule.when is None for rule in key.rules)
    ]
    assert "rollout.calculate_log_probs" in names
    hints = [path for path in (ROOT / "dovetail" / "dashboard").rglob("*") if path.suffix in (".py", ".js")]
    assert [(path.name, name) for path in (*PAGES, *hints) for name in names if f"{name}=" in path.read_text()] == []


PACKAGE = ROOT / "dovetail"
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


ALGORITHMS = sorted((ROOT / "docs" / "algorithms").glob("*.md"))
PARTS = ["When to use it", "Formula", "Keys", "Launch", "What to watch", "Paper and code"]
OTHER_NAMES = {"grpo_vectorized", "rloo_vectorized"}
DEFAULTS = {"vanilla", "sigmoid"}


def launched(key: str) -> set[str]:
    """The values that launch lines of the pages give a key."""
    blocks = [block for page in ALGORITHMS for block in blocks_of(page) if block.how == "check"]
    lines = [line for block in blocks for line in block.commands()]
    words = [word.partition("=") for line in lines for word in shlex.split(line)]
    return {value for name, _, value in words if name == key}


def test_every_estimator_and_loss_is_on_a_launch_line() -> None:
    assert {*ADV_ESTIMATORS} - OTHER_NAMES == launched("algorithm.adv_estimator")
    losses = launched("actor_rollout_ref.actor.policy_loss.loss_mode") | launched("dpo.loss_type")
    assert {*POLICY_LOSSES, *preference_loss_names()} - DEFAULTS == losses


@pytest.mark.parametrize("page", ALGORITHMS, ids=lambda page: page.stem)
def test_the_page_is_complete(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == PARTS
    watch, paper = text.split("## What to watch")[1].split("## Paper and code")
    metrics = re.findall(r"`([a-z_-]+/[^`. ]+)`", watch)
    assert metrics
    assert unexplained(metrics) == []
    assert re.search(r"\]\(https://", paper)
    files = [*re.findall(r"`(dovetail/[^`]+)`", paper), *re.findall(r"`(recipes/[^`]+)`", watch)]
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert f"(../algorithms/{page.name})" in (ROOT / "docs" / "guide" / "choosing.md").read_text()


DOCUMENT = ROOT / "docs" / "configuration.md"


def test_the_document_is_up_to_date() -> None:
    assert main(["--check", str(DOCUMENT)]) == 0


def test_the_document_names_every_key() -> None:
    text = document()
    assert [key for key in catalogue(DovetailConfig) if f"`{key}`" not in text] == []


def test_an_old_document_is_refused_with_the_command_that_renews_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "configuration.md"
    assert main(["--check", str(path)]) == 1
    assert f"python tools/configuration_page.py {path}" in capsys.readouterr().err
    assert main([str(path)]) == 0
    assert main(["--check", str(path)]) == 0
