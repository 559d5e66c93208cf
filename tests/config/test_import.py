"""The config is light: no torch, no ray, and a check answers at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

_PROGRAM = """
import sys, time
start = time.perf_counter()
from dovetail.config import load_config
loaded = load_config(overrides=["trainer.seed=3"])
seconds = time.perf_counter() - start
heavy = [name for name in ("torch", "ray", "transformers", "tensordict", "numpy", "omegaconf") if name in sys.modules]
print(heavy, seconds)
"""


def test_loading_a_configuration_imports_nothing_heavy_and_takes_under_a_second() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    heavy, _, seconds = done.stdout.strip().rpartition(" ")
    assert heavy == "[]"
    # Measured 0.25 s on one core; the bound leaves room for a busy machine.
    assert float(seconds) < 1.0
