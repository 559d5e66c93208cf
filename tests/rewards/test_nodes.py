"""Scoring on every node of a cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program
from tests.ray_workers import quick_workers

pytestmark = pytest.mark.distributed


def test_two_nodes_share_a_batch_and_one_takes_over_when_the_other_is_lost(tmp_path: Path) -> None:
    """Two Ray nodes take 10 s to start; nothing cheaper has actors on another node, or loses one."""
    file = ROOT / "tests" / "rewards" / "two_nodes.py"
    words = [sys.executable, str(file), str(tmp_path), json.dumps(quick_workers())]
    done = run_program(words)
    assert done.returncode == 0, done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["parents"]) == 2
    assert result["driver"] in result["parents"]
    assert result["texts"] == [("abcdefgh" * 2)[: 1 + row % 9] for row in range(24)]
    assert result["first"] == result["second"] == [1 + row % 9 for row in range(24)]
    assert result["failed"] == 0
    assert result["processes_left"] == 1
