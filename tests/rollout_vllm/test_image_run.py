"""A whole training run on prompts with images that generates with real vLLM, which is given the pictures themselves."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from dovetail.workers.weight_check import NUM_COMPARED
from tests.rollout_vllm.test_training_run import KEYS
from tests.trainer import image_run
from tests.trainer.toy_run import train

pytestmark = pytest.mark.engine


def test_vllm_and_trainer_see_the_same_pictures_at_every_step_of_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dovetail.workers.hybrid_engine")
    for library in ("torchvision", "blake3"):  # vLLM reads images with both; a text engine needs neither
        pytest.importorskip(library)
    toy = image_run.save_image_toy(tmp_path / "toy", with_videos=True)
    result, metrics = train(toy.config(tmp_path / "run", {**image_run.KEYS, **KEYS}))
    assert result.steps == 3
    # The same bound as for text: positions or pixels that differed would be off by far more.
    assert [row["rollout_corr/probs_diff_max"] < 1e-4 for row in metrics] == [True] * 3
    proved = re.search(r"(\d+) tensors equal", caplog.text)
    assert proved, "the run starts with a proof"
    assert int(proved[1]) > NUM_COMPARED, "weights of a model with other names in vLLM can be read back"
    assert all(row["actor/grad_norm"] > 0 for row in metrics)
