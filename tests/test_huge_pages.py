"""Large CPU tensors lie on huge pages once dovetail is imported, where the kernel offers them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

OFFERED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import torch
column = torch.ones(32 * 2**20)  # 128 MiB
for line in open("/proc/self/smaps_rollup"):
    if line.startswith("AnonHugePages"):
        print(int(line.split()[1]) // 1024)
"""


def _huge_mebibytes(before: str = "import dovetail", **environment: str) -> int:
    inherited = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-c", before + PROGRAM],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(
    not OFFERED.exists() or "[madvise]" not in OFFERED.read_text(), reason="the kernel decides without being asked"
)
def test_importing_dovetail_puts_large_tensors_on_huge_pages_unless_the_user_says_no() -> None:
    assert _huge_mebibytes() >= 64
    if _huge_mebibytes("", THP_MEM_ALLOC_ENABLE="0") >= 64:
        pytest.skip("this build of torch, as on ARM, asks for huge pages whatever the variable says")
    assert _huge_mebibytes(THP_MEM_ALLOC_ENABLE="0") < 64
