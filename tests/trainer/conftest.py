"""The model and the data of the toy runs, written once."""

from __future__ import annotations

import pytest

from tests.trainer.toy_run import Toy, make_toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))
