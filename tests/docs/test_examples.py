"""Every command of examples/README.md runs as it stands, on tiny models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.blocks import Block, blocks_of
from tests.docs.test_guide import ROOT, run_block

pytestmark = pytest.mark.e2e

EXAMPLES = ROOT / "examples"
BLOCKS = blocks_of(EXAMPLES / "README.md")


@pytest.fixture(scope="module")
def examples(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder with models and the prompts that the first block makes for all others."""
    folder = tmp_path_factory.mktemp("reader") / "examples"
    shutil.copytree(EXAMPLES, folder)
    shutil.copytree(models, folder / "models")
    run_block(BLOCKS[0], folder)
    return folder


@pytest.mark.parametrize("block", BLOCKS[1:], ids=lambda block: " ".join(block.commands()[0].split()[1:4]))
def test_the_example_runs(block: Block, examples: Path) -> None:
    run_block(block, examples)


def test_every_example_file_is_used_by_a_command_or_a_configuration() -> None:
    used = (EXAMPLES / "README.md").read_text() + "".join(path.read_text() for path in EXAMPLES.glob("*.yaml"))
    for path in EXAMPLES.iterdir():
        assert path.name == "README.md" or path.name in used, path.name
