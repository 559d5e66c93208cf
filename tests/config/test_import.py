"""What must start at once imports nothing heavy."""

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


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("dovetail.agents", "torch pydantic"),
        ("dovetail.protocol", "ray"),
        # Each run starts several scoring processes: 0.1 s of CPU each, twice that with asyncio, 0.5 s with pydantic.
        ("dovetail.rewards.worker_process", "pydantic asyncio"),
    ],
)
def test_a_module_is_imported_without(module: str, heavy: str) -> None:
    program = f"import sys, {module}; sys.exit(any(name in sys.modules for name in {heavy.split()}))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
