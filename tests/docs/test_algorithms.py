"""Each algorithm has a page: what it is for, its formula, keys, a launch line, metrics and the paper."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dovetail.algorithms.offline import preference_loss_names
from dovetail.config.names import ADV_ESTIMATORS, POLICY_LOSSES
from tests.docs.blocks import blocks_of
from tests.docs.glossary import unexplained

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "algorithms").glob("*.md"))
PARTS = ["When to use it", "Formula", "Keys", "Launch", "What to watch", "Paper and code"]
OTHER_NAMES = {"grpo_vectorized", "rloo_vectorized"}
DEFAULTS = {"vanilla", "sigmoid"}


def launched(key: str) -> set[str]:
    """The values that launch lines of the pages give a key."""
    lines = [line for page in PAGES for block in blocks_of(page) if block.how == "check" for line in block.commands()]
    words = [word.partition("=") for line in lines for word in shlex.split(line)]
    return {value for name, _, value in words if name == key}


def test_every_estimator_and_loss_is_on_a_launch_line() -> None:
    assert {*ADV_ESTIMATORS} - OTHER_NAMES == launched("algorithm.adv_estimator")
    losses = launched("actor_rollout_ref.actor.policy_loss.loss_mode") | launched("dpo.loss_type")
    assert {*POLICY_LOSSES, *preference_loss_names()} - DEFAULTS == losses


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
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
