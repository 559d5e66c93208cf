"""Code of the reference pages: Python blocks are run page by page, what they take as given is made here first.

Configurations are resolved. The README's example runs, and the reference of the API is complete.
Commands are the business of `test_commands`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import dovetail
from dovetail.config import load_config
from tests.docs.blocks import Block, blocks_of
from tests.docs.test_guide import ENVIRONMENT, ROOT
from tests.programs import run_program
from tests.ray_workers import quick_workers

pytestmark = pytest.mark.e2e

DOCS = ROOT / "docs"
BLOCKS = [block for page in sorted(DOCS.glob("*.md")) for block in blocks_of(page)]
_KEYS = re.compile(r"(?:[a-z_]+(?:\.[a-z_]+)+=.*\n)+")
CHAINS = [block for block in BLOCKS if not block.language and not _KEYS.fullmatch(block.text)]
OF_VLLM = {"EngineCore", "ModelRunner"}
PYTHON_PAGES = sorted({block.page for block in BLOCKS if block.language == "python"})

CONFIG = """
from dovetail.config import load_config
from dovetail.demo.tasks import generate_task
from dovetail.data.files import write_rows
from dovetail.models.load import load_tokenizer
from pathlib import Path
write_rows(generate_task("addition", levels=[1], num_train=8, num_test=2).train, Path("train.parquet"))
config = load_config(overrides=[
    "data.train_files=train.parquet", "data.train_batch_size=2", "data.max_prompt_length=128",
    "data.max_response_length=8", "actor_rollout_ref.model.path=model", "trainer.n_gpus_per_node=1",
]).config
tokenizer, processor = load_tokenizer("model"), None
"""
ENGINE = """
import torch
from transformers import AutoModelForCausalLM
from dovetail.backends.build import build_backend
from dovetail.config.fsdp import FSDPConfig, MixedPrecisionConfig
from dovetail.models.policy import PolicyModel
from dovetail.rollout import GenerationRequest, SamplingParams, get_engine_class
fsdp = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float32"))
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
backend = build_backend("single", PolicyModel(model), fsdp=fsdp)
engine = get_engine_class("native")("model", dtype=torch.float32)
requests = [GenerationRequest("q", [5, 6, 7], SamplingParams(max_new_tokens=4))]
"""
# What the n-th Python block of a page takes as given.
GIVEN: dict[tuple[str, int], str] = {
    ("algorithms.md", 0): """
import torch
micro_batches = [
    {"response_mask": torch.ones(n, 3), "losses": torch.ones(n, 3, requires_grad=True)} for n in (1, 2)
]
""",
    ("controller.md", 0): """
import torch
from dovetail.protocol import DataProto
batch = DataProto.from_dict({"x": torch.arange(8.0)})
""",
    ("controller.md", 2): """
assert scores.tensors["scores"].tolist() == [2.0 * n for n in range(8)]
class Rollout(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"y": batch.tensors["x"] + 1})
class Critic(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"v": batch.tensors["y"] * 10})
rollout = LocalWorkerGroup(RayClassWithInitArgs(Rollout))
critic = LocalWorkerGroup(RayClassWithInitArgs(Critic))
prompts = batch
""",
    ("data.md", 0): CONFIG,
    ("protocol.md", 0): """
import numpy as np, torch
from dovetail.protocol import DataProto
ids, uids = torch.ones(2, 3), np.array(["a", "b"], dtype=object)
outputs = [DataProto.from_dict({"values": torch.zeros(4)}) for _ in range(4)]
""",
    ("rewards.md", 1): CONFIG
    + """
from dovetail.data.build import build_train_loader
from tests.rewards.test_runner import answers
dataset = build_train_loader(config, tokenizer, processor).dataset
batch = answers("4", "x", truth="4", source="dovetail/addition")
""",
    ("rollout.md", 0): "prompt_ids = [5, 6, 7]\n",
    ("weight_sync.md", 0): ENGINE,
}
SMALLER = {
    "path/to/model": "model",
    "Qwen/Qwen2.5-0.5B-Instruct": "model",
    '.GRPO("model", rows, reward=score).train()': '.GRPO("model", rows, reward=score, steps=1).train()',
    "rows, reward=score, config={": 'rows, reward=score, steps=1, config={"data.max_response_length": 64, ',
    "max_new_tokens=512": "max_new_tokens=8",
    "RayResourcePool([4]": "RayResourcePool([2]",
}
START = "start_ray(num_cpus=4)"
AFTER = {
    ("agents.md", 1): "assert run.steps == 1 and {row['outcome'] for row in run.samples} <= {'finished', 'length'}\n",
    ("algorithms.md", 0): "assert torch.allclose(micro_batches[1]['losses'].grad, torch.full((2, 3), 1 / 9))\n",
    (
        "controller.md",
        2,
    ): "assert values.get().tensors['v'].tolist() == [10.0 * n for n in range(1, 9)]\nstop_ray()\n",
    ("protocol.md", 0): "assert len(batch) == 16 and len(parts) == 4 and 'values' in batch\n",
    ("rewards.md", 0): "assert compute_score('', ' 4', '4', {})['acc']\n",
    ("rewards.md", 1): "assert 'token_level_scores' in batch\n",
    ("rollout.md", 0): "assert len(results) == 8 and len(batch) == 8\n",
    ("weight_sync.md", 0): "assert engine.weight_version == 7\n",
    ("weight_sync.md", 1): "assert len(results) == 1\n",
}


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_of_the_page_runs(page: str, models: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(models / "policy")
    blocks = [block for block in BLOCKS if block.page == page and block.language == "python"]
    for block in blocks:
        if block.title is not None:
            (tmp_path / block.title).write_text(block.text)
    parts = [GIVEN.get((page, n), "") + block.text + AFTER.get((page, n), "") for n, block in enumerate(blocks)]
    body = "\n".join(parts)
    if START in body:
        body = body.replace(START, f"start_ray(num_cpus=2, runtime_env={quick_workers()})")
    for old, new in SMALLER.items():
        body = body.replace(old, new)
    (tmp_path / "page.py").write_text(body)
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    done = run_program([sys.executable, "page.py"], cwd=tmp_path, env=environment)
    assert done.returncode == 0, f"{page}\n{done.stdout[-6000:]}"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_configuration_of_the_page_resolves(block: Block, tmp_path: Path) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)
    (tmp_path / "page.yaml").write_text(block.text)
    load_config([tmp_path / "page.yaml"])


@pytest.mark.parametrize("block", [b for b in BLOCKS if _KEYS.fullmatch(b.text)], ids=str)
def test_keys_of_the_page_resolve(block: Block) -> None:
    load_config(overrides=[word for line in block.commands() for word in shlex.split(line, comments=True)])


@pytest.mark.parametrize("page", sorted({block.page for block in CHAINS}))
def test_files_named_in_call_chains_exist(page: str) -> None:
    files = [str(path.relative_to(ROOT)) for folder in ("dovetail", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = {name for block in CHAINS if block.page == page for name in re.findall(r"[\w/]*\w\.py\b", block.text)}
    assert sorted(name for name in named if not any(file.endswith(f"/{name}") for file in files)) == []


@pytest.mark.parametrize("page", ["architecture.md", "megatron.md", "training.md"])
def test_classes_and_functions_named_in_call_chains_exist(page: str) -> None:
    code = "".join(path.read_text() for path in (ROOT / "dovetail").rglob("*.py"))
    chains = "".join(re.sub(r"[\w/]*\w\.py\b", "", block.text) for block in CHAINS if block.page == page)
    named = set(re.findall(r"\b(?:_?[a-z]+_[a-z_]+|[A-Z]+[a-z]+[A-Z]\w+)\b", chains))
    assert named - set(re.findall(r"\w+", code)) - OF_VLLM == set()


def test_files_and_folders_named_in_the_architecture_exist() -> None:
    paths = [f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in (ROOT / "dovetail").rglob("*")]
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", (DOCS / "architecture.md").read_text()))
    assert len(named) > 50
    assert sorted(name for name in named if not any(path.endswith(f"/{name}") for path in paths)) == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_no_block_of_the_page_is_overlooked(page: Path) -> None:
    assert len(re.findall(r"^```", page.read_text(), re.MULTILINE)) == 2 * len(blocks_of(page))


def test_the_example_of_the_readme_has_ten_lines_and_runs(models: Path, tmp_path: Path) -> None:
    """Its function belongs to `__main__`, as in a notebook: the scoring processes must get it from there."""
    [block] = [block for block in blocks_of(ROOT / "README.md") if block.language == "python"]
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 10
    (tmp_path / "model").symlink_to(models / "policy")
    program = block.text.replace(
        '"Qwen/Qwen2.5-0.5B-Instruct", rows, reward=score', '"model", rows, reward=score, steps=1'
    )
    assert program != block.text
    (tmp_path / "example.py").write_text(program + "assert run.steps == 1 and run.checkpoint\n")
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    done = run_program([sys.executable, "example.py"], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-6000:]


def test_the_reference_lists_every_public_name_and_each_has_a_docstring() -> None:
    """mkdocstrings leaves out what has none."""
    listed = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert {f"dovetail.{name}" for name in dovetail.__all__} <= set(listed)
    guide = (ROOT / "docs" / "guide" / "extending.md").read_text()
    registered = [name.rpartition(".")[2] for name in listed if ".register_" in name]
    assert set(re.findall(r"\bregister_\w+", guide)) == set(registered)
    assert [name for path in listed for name, member in documented(path) if not inspect.getdoc(member)] == []


def documented(path: str) -> Iterator[tuple[str, Any]]:
    """A name of the page, and the public methods and properties of a class."""
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    yield path, value
    for attribute, member in vars(value).items() if isinstance(value, type) else ():
        if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            yield f"{path}.{attribute}", member
