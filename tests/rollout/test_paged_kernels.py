"""The cases of `paged_kernels.py` in a process of their own: Triton decides at its import whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = dict(os.environ)
CASES = Path(__file__).with_name("paged_kernels.py")
Done = subprocess.CompletedProcess[str]


@pytest.mark.engine
@pytest.mark.parametrize("tier", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_equal_plain_pytorch_through_tritons_interpreter(tier: str) -> None:
    _assert_passed(_run_cases(f"not gpu and {tier}", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""))


@pytest.mark.gpu
def test_kernels_equal_plain_pytorch_on_the_device() -> None:
    _assert_passed(_run_cases("unit or gpu", TRITON_INTERPRET="0"))


def _run_cases(marks: str, **environment: str) -> Done:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, str(CASES)]
    return subprocess.run(command, env={**ENVIRONMENT, **environment}, capture_output=True, text=True, check=False)


def _assert_passed(done: Done) -> None:
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout, "Triton must be installed for these tests"
