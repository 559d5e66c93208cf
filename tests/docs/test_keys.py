"""Keys that the text of a page names are keys: a reader copies them from a sentence as well as from a block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dovetail.config.keys import catalogue, find_key, sections
from dovetail.config.root import DovetailConfig

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
# `configuration.md` is made from the keys themselves, and lists those of other systems.
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "configuration.md"})]
SECTIONS = sections(DovetailConfig)
SHORT = {name: f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout", "ref")}
# A column of the data, files, and old spellings that are translated.
NO_KEYS = {"reward_model.ground_truth", "trainer.json", "actor.tis_imp_ratio_cap", "algorithm.rollout_is"}
NO_KEYS |= {"critic.model.fsdp_config"}
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
    assert wrong_keys(page.read_text()) == []


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
