"""The config is light: no torch, no ray, and a check answers at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

_PROGRAM = """
import sys
started_with = set(sys.modules)
from dovetail.config import load_config
load_config(overrides=["trainer.seed=3"])
heavy = [name for name in ("torch", "ray", "transformers", "tensordict", "numpy", "omegaconf") if name in sys.modules]
print(heavy, len(set(sys.modules) - started_with))
"""


def test_loading_a_configuration_imports_nothing_heavy_and_few_modules_at_all() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    heavy, _, count = done.stdout.strip().rpartition(" ")
    assert heavy == "[]"
    # 188, most of them pydantic's and the standard library's, in 0.25 s. torch alone would be a thousand more.
    assert int(count) < 300


def test_a_scoring_process_starts_without_the_sections_of_the_configuration() -> None:
    """Each run starts several: 0.15 s of CPU each, 0.5 s with pydantic and the sections."""
    program = "import sys, dovetail.rewards.worker_process; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
