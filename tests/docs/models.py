"""The tiny models that pages of the docs stand on, made once, in a process of its own: see `tests.ahead`."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.models.tiny import tiny_tokenizer
from tests.ranks import run_alone
from tests.trainer.toy_run import save_toy_model
from tests.workers.tiny_run import save_classifier

_MAKING = threading.Lock()


def models_in(root: Path) -> Path:
    """A folder in `root` with `policy` and `reward`, a sequence classifier."""
    folder = root / "models-of-the-docs"
    with _MAKING:
        if not folder.exists():
            run_alone(_save, folder)
    return folder


def _save(rank: int, world_size: int, folder: Path) -> None:
    save_toy_model(folder / "policy")
    save_classifier(folder / "reward")
    tiny_tokenizer().save_pretrained(folder / "reward")
