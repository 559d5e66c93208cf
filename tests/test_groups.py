"""Tests that share something dear run in one process."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import xdist.remote

from tests.groups import group_of

pytestmark = pytest.mark.unit


def test_a_module_is_a_group_unless_it_names_one(tmp_path: Path) -> None:
    plain, one, other = (tmp_path / f"test_{name}.py" for name in ("plain", "one", "other"))
    plain.write_text("pytestmark = pytest.mark.unit\n")
    for module in (one, other):
        module.write_text('pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("vllm")]\n')
    assert group_of(one) == group_of(other) == "vllm"
    assert group_of(plain) not in ("vllm", group_of(Path(__file__)))


def test_pytest_xdist_still_writes_what_pytest_does_not_read() -> None:
    """Once this fails, `tests/groups.py` can go: `--dist loadgroup` works by itself, given a group for every module."""
    assert "item._nodeid = " in inspect.getsource(xdist.remote.WorkerInteractor.pytest_collection_modifyitems)
    assert "_nodeid" not in inspect.getsource(pytest.Item.nodeid.fget)
