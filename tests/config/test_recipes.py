"""Every recipe in the repository resolves and passes the checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.config import load_config
from dovetail.config.checks import check_config
from dovetail.config.effects import unsupported_in_runs
from dovetail.config.plan import make_plan, shape_from_config
from tests.config.plan import known_models as known

pytestmark = pytest.mark.unit

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves_and_can_run(recipe: Path) -> None:
    config = load_config([recipe]).config
    assert [str(finding) for finding in check_config(config) if finding.severity == "error"] == []
    assert unsupported_in_runs(config) == []


def test_the_recipe_for_eight_gpus_fits_into_80_gib() -> None:
    config = load_config([next(path for path in RECIPES if "8gpus" in path.stem)]).config
    plan = make_plan(config, shape_from_config(known.QWEN2_5_7B))
    assert plan.memory is not None
    assert plan.memory.device_bytes == 80 * 2**30
    assert plan.memory.fits, plan.memory.verdict
    assert plan.batches.sequences == 1024
