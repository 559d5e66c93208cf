"""The tiny models that pages of the docs stand on, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.tiny import tiny_tokenizer
from tests.trainer.toy_run import save_toy_model
from tests.workers.tiny_run import save_classifier


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `policy` and `reward`, a sequence classifier."""
    folder = tmp_path_factory.mktemp("models")
    save_toy_model(folder / "policy")
    save_classifier(folder / "reward")
    tiny_tokenizer().save_pretrained(folder / "reward")
    return folder
