"""The Python example of the README, and the API reference."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dovetail
from tests.docs.blocks import blocks_of
from tests.docs.test_guide import ENVIRONMENT, ROOT
from tests.programs import run_program

pytestmark = pytest.mark.e2e


def test_the_example_of_the_readme_has_ten_lines_and_runs(models: Path, tmp_path: Path) -> None:
    """Its function belongs to `__main__`, as in a notebook: the scoring processes must get it from there."""
    [block] = [block for block in blocks_of(ROOT / "README.md") if block.language == "python"]
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 10
    (tmp_path / "model").symlink_to(models / "policy")
    program = block.text.replace(
        '"Qwen/Qwen2.5-0.5B-Instruct", rows, reward=score', '"model", rows, reward=score, steps=1'
    )
    assert program != block.text
    (tmp_path / "example.py").write_text(program + "assert run.steps == 1 and run.checkpoint\n")
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    done = run_program([sys.executable, "example.py"], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-6000:]


def test_the_reference_lists_every_public_name_and_each_has_a_docstring() -> None:
    """mkdocstrings leaves out what has none."""
    listed = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert {f"dovetail.{name}" for name in dovetail.__all__} <= set(listed)
    guide = (ROOT / "docs" / "guide" / "extending.md").read_text()
    registered = [name.rpartition(".")[2] for name in listed if ".register_" in name]
    assert set(re.findall(r"\bregister_\w+", guide)) == set(registered)
    assert [name for path in listed for name, member in documented(path) if not inspect.getdoc(member)] == []


def documented(path: str) -> Iterator[tuple[str, Any]]:
    """A name of the page, and the public methods and properties of a class."""
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    yield path, value
    for attribute, member in vars(value).items() if isinstance(value, type) else ():
        if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            yield f"{path}.{attribute}", member
