"""Two vLLM servers for the whole folder, started side by side: a start costs more than all the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.tiny import save_tiny_model
from tests.rollout_remote.servers import VLLMServer

FAMILY = "llama_tied"


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(FAMILY, tmp_path_factory.mktemp("models") / FAMILY)


@pytest.fixture(scope="package")
def _started(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VLLMServer]]:
    logs = tmp_path_factory.mktemp("logs")
    started = [VLLMServer(folder, logs / f"server{number}.log") for number in range(2)]
    yield started
    for server in started:
        server.stop()


@pytest.fixture
def servers(_started: list[VLLMServer], folder: Path) -> list[VLLMServer]:
    """Both answer: what a test before has killed is started again."""
    for number, server in enumerate(_started):
        if not server.is_alive:
            server.stop()
            _started[number] = VLLMServer(folder, server.log)
    for server in _started:
        server.wait()
    return _started
