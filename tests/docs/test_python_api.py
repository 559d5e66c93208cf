"""The Python example of the README, and the API reference."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import dovetail
from tests.docs.blocks import blocks_of
from tests.docs.test_guide import ENVIRONMENT, ROOT
from tests.programs import run_program
from tools.api_reference import document

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


def test_the_reference_is_up_to_date_and_has_every_name() -> None:
    text = document()
    assert (ROOT / "docs" / "api.md").read_text() == text, "run `python tools/api_reference.py docs/api.md`"
    assert all(f"## dovetail.{name}\n" in text for name in dovetail.__all__)
    guide = (ROOT / "docs" / "guide" / "extending.md").read_text()
    for name in ("register_adv_est", "register_policy_loss", "register_tracker", "register_engine"):
        assert name in guide
        assert f".{name}\n" in text
