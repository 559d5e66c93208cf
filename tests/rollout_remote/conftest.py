"""Two vLLM servers for the whole folder, started side by side: a start costs more than all the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.rollout.sglang.environment import PYTHON_VARIABLE
from tests.models.tiny import save_tiny_model
from tests.rollout_remote.servers import VLLMServer

FAMILY = "llama_tied"
collect_ignore = [] if PYTHON_VARIABLE in os.environ else ["test_sglang_server.py"]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(FAMILY, tmp_path_factory.mktemp("models") / FAMILY)


@pytest.fixture(scope="package")
def servers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VLLMServer]]:
    logs = tmp_path_factory.mktemp("logs")
    started = [VLLMServer(folder, logs / f"server{number}.log") for number in range(2)]
    try:
        for server in started:
            server.wait()
        yield started
    finally:
        for server in started:
            server.stop()
