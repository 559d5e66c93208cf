"""A training run on images with vLLM, in a process of its own: ``python -m tests.rollout_vllm.image_training FOLDER``.

vLLM reads images with torchvision and blake3. Where torch is a CPU build the published torchvision needs help to be
imported (`sglang_cpu_start`, from a sitecustomize), and beside all other tests it would change what transformers does:
only this process and those it starts find the two.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path


def main(folder: Path) -> None:
    from tests.rollout_vllm.test_training_run import KEYS
    from tests.trainer import image_run
    from tests.trainer.toy_run import train

    logging.basicConfig(level=logging.INFO, filename=folder / "log.txt")
    toy = image_run.save_image_toy(folder / "toy", with_videos=True)
    result, metrics = train(toy.config(folder / "run", {**image_run.KEYS, **KEYS}))
    (folder / "found.json").write_text(json.dumps({"steps": result.steps, "metrics": metrics}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
