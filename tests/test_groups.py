"""Tests that share something dear run in one process."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import xdist.remote

from tests.groups import group_of, is_unit

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.unit


def test_a_module_is_a_group_unless_it_names_one(tmp_path: Path) -> None:
    plain, one, other = (tmp_path / f"test_{name}.py" for name in ("plain", "one", "other"))
    plain.write_text("pytestmark = pytest.mark.unit\n")
    for module in (one, other):
        module.write_text('pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("vllm")]\n')
    assert group_of(one) == group_of(other) == "vllm"
    assert group_of(plain) not in ("vllm", group_of(Path(__file__)))


def test_only_a_module_that_is_all_unit_tests_counts_as_one(tmp_path: Path) -> None:
    unit, mixed = tmp_path / "test_unit.py", tmp_path / "test_mixed.py"
    unit.write_text('"""Short."""\n\npytestmark = pytest.mark.unit\n')
    mixed.write_text("\n@pytest.mark.unit\ndef test_short(): pass\n")
    assert is_unit(group_of(unit))
    assert not is_unit(group_of(mixed))
    assert not is_unit("sglang")


def test_a_test_that_kills_what_others_share_comes_last_in_its_group(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems")
    pytester.makeini("[pytest]\nmarkers =\n    kills: x\n    xdist_group: x\n")
    head = "import pytest\n"
    killing = "@pytest.mark.kills\ndef test_kills(): pass\ndef test_stays(): pass\n"
    pytester.makepyfile(
        test_a=f"{head}pytestmark = pytest.mark.xdist_group('servers')\n{killing}",
        test_b="def test_alone(): pass\n",
        test_c=f"{head}pytestmark = pytest.mark.xdist_group('servers')\ndef test_also(): pass\n",
    )
    lines = pytester.runpytest("--collect-only", "-q", "-p", "no:randomly").outlines
    names = [line.partition("::")[2] for line in lines if "::" in line]
    assert names == ["test_stays", "test_also", "test_kills", "test_alone"]


def test_pytest_xdist_still_writes_what_pytest_does_not_read() -> None:
    """Once this fails, `tests/groups.py` can go: `--dist loadgroup` works by itself, given a group for every module."""
    assert "item._nodeid = " in inspect.getsource(xdist.remote.WorkerInteractor.pytest_collection_modifyitems)
    assert "_nodeid" not in inspect.getsource(pytest.Item.nodeid.fget)
