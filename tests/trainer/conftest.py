"""The model and the data of the toy runs, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.toy_run import Toy, save_toy_data, save_toy_model


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder: Path = tmp_path_factory.mktemp("toy")
    return Toy(save_toy_model(folder / "model"), save_toy_data(folder / "data"))
