"""A whole training run on prompts with images that generates with real vLLM, which is given the pictures themselves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.workers.weight_check import NUM_COMPARED

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # pictures reach the trainer in trainer/test_image_runs, with the embedded engine
def test_vllm_and_trainer_see_the_same_pictures_at_every_step_of_a_run(tmp_path: Path) -> None:
    vision = os.environ.get("DOVETAIL_VISION_PATH")
    if not vision:
        pytest.skip("DOVETAIL_VISION_PATH is not set to a folder with torchvision and blake3; `make test` sets it")
    # vLLM looks at a model's class in a process of its own, unless a run before has left what it found there.
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text("import sglang_cpu_start\n")
    folders = [str(ROOT), vision, str(tmp_path / "start"), str(ROOT / "dovetail" / "rollout" / "sglang" / "cpu")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.rollout_vllm.image_training", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders), "VLLM_CACHE_ROOT": str(tmp_path / "cache")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["steps"] == 3
    # The same bound as for text: positions or pixels that differed would be off by far more.
    assert [row["rollout_corr/probs_diff_max"] < 1e-4 for row in found["metrics"]] == [True] * 3
    proved = re.search(r"(\d+) tensors equal", (tmp_path / "log.txt").read_text())
    assert proved, "the run starts with a proof"
    assert int(proved[1]) > NUM_COMPARED, "weights of a model with other names in vLLM can be read back"
    assert all(row["actor/grad_norm"] > 0 for row in found["metrics"])
