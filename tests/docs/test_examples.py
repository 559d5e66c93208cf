"""Every command of examples/README.md runs as it stands, on tiny models."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.ahead import ahead
from tests.docs.blocks import Block, blocks_of
from tests.docs.models import models_in
from tests.docs.test_guide import ROOT, run_block

pytestmark = pytest.mark.e2e

EXAMPLES = ROOT / "examples"
BLOCKS = blocks_of(EXAMPLES / "README.md")
_PREPARING = threading.Lock()


@ahead
def carried_out(folder: Path, block: Block) -> None:
    examples = folder.parent / "examples"
    with _PREPARING:
        if not examples.exists():
            shutil.copytree(EXAMPLES, examples)
            shutil.copytree(models_in(folder.parent), examples / "models")
            run_block(BLOCKS[0], examples)  # makes the prompts of all others
    run_block(block, examples)


@pytest.mark.parametrize("block", BLOCKS[1:], ids=lambda block: " ".join(block.commands()[0].split()[1:4]))
def test_the_example_runs(block: Block, carried_out: Future[None]) -> None:
    carried_out.result()


def test_every_example_file_is_used_by_a_command_or_a_configuration() -> None:
    used = (EXAMPLES / "README.md").read_text() + "".join(path.read_text() for path in EXAMPLES.glob("*.yaml"))
    for path in EXAMPLES.iterdir():
        assert path.name == "README.md" or path.name in used, path.name
