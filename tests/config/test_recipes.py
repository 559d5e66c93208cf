"""Every recipe in the repository resolves and passes the checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.config import load_config
from dovetail.config.checks import check_config
from dovetail.config.effects import unsupported_in_runs

pytestmark = pytest.mark.unit

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves_and_can_run(recipe: Path) -> None:
    config = load_config([recipe]).config
    assert [str(finding) for finding in check_config(config) if finding.severity == "error"] == []
    assert unsupported_in_runs(config) == []
