"""Launch lists that people really use pass the cross-field checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.config import load_config
from dovetail.config.checks import check_config
from dovetail.config.plan import make_plan, shape_from_config
from tests.config.plan import known_models as known

pytestmark = pytest.mark.unit

LISTS = sorted((Path(__file__).parents[1] / "compat").glob("*.txt"))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_a_published_launch_list_has_no_error_and_a_plan(path: Path) -> None:
    shape = shape_from_config(known.DEEPSEEK_V3 if "671b" in path.name else known.QWEN2_5_32B)
    config = load_config(overrides_files=[path]).config
    assert [finding for finding in check_config(config, shape) if finding.severity == "error"] == []
    plan = make_plan(config, shape)
    assert plan.memory is not None
    assert plan.memory.fits


def test_the_four_lists_are_there() -> None:
    assert len(LISTS) == 4
