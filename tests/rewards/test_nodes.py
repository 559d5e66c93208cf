"""Scoring on every node of a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]


def test_two_nodes_share_a_batch_and_one_takes_over_when_the_other_is_lost(tmp_path: Path) -> None:
    """Two Ray nodes take 15 s to start; nothing cheaper has actors on another node, or loses one."""
    program = [sys.executable, "-m", "tests.rewards.two_nodes", str(tmp_path)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["parents"]) == 2
    assert result["driver"] in result["parents"]
    assert result["texts"] == [("abcdefgh" * 2)[: 1 + row % 9] for row in range(24)]
    assert result["first"] == result["second"] == [1 + row % 9 for row in range(24)]
    assert result["failed"] == 0
    assert result["processes_left"] == 1
