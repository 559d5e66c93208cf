"""Every command of examples/README.md runs as it stands, on tiny models."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.blocks import Block, blocks_of
from tests.docs.test_guide import ROOT, run_block
from tests.models.tiny import tiny_tokenizer
from tests.trainer.toy_run import save_toy_model
from tests.workers.tiny_run import save_classifier

pytestmark = pytest.mark.e2e

EXAMPLES = ROOT / "examples"
BLOCKS = blocks_of(EXAMPLES / "README.md")
_MAKING_PROMPTS = threading.Lock()


def prepare(folder: Path) -> Path:
    """The examples with models beside them."""
    examples = folder / "examples"
    shutil.copytree(EXAMPLES, examples)
    save_toy_model(examples / "models" / "policy")
    save_classifier(examples / "models" / "reward")
    tiny_tokenizer().save_pretrained(examples / "models" / "reward")
    return examples


def carry_out(block: Block, examples: Path, folder: Path) -> None:
    """On the prompts that the first block makes."""
    with _MAKING_PROMPTS:
        if not (examples / "data").exists():
            run_block(BLOCKS[0], examples)
    run_block(block, examples)


@pytest.mark.parametrize("block", BLOCKS[1:], ids=lambda block: " ".join(block.commands()[0].split()[1:4]))
def test_the_example_runs(block: Block, carried_out: Callable[[], None]) -> None:
    carried_out()


def test_every_example_file_is_used_by_a_command_or_a_configuration() -> None:
    used = (EXAMPLES / "README.md").read_text() + "".join(path.read_text() for path in EXAMPLES.glob("*.yaml"))
    for path in EXAMPLES.iterdir():
        assert path.name == "README.md" or path.name in used, path.name
