"""Every command of the reference pages and of the README is carried out, on tiny models and data made here.

Sizes and places of the pages are replaced by ones that fit (`INSTEAD`). What cannot be carried out here is in
`NOT_HERE` with the reason and is only read; what needs a server that other tests start anyway is in `ELSEWHERE`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest

from dovetail.cli.main import COMMANDS, main
from dovetail.config import load_config
from dovetail.data.files import write_rows
from dovetail.data.prepare import GSM8K_SOURCE, MATH_SOURCE
from dovetail.observability.run_folder import RunFolder
from tests.config.plan.known_models import DEEPSEEK_V3
from tests.dashboard.synthetic import write_run
from tests.docs.blocks import blocks_of
from tests.docs.commands import PAGES, REST_OF_KEYS, ROOT, Command, commands_in_text, page_commands
from tests.hub import put_in_cache
from tests.trainer.toy_run import Toy, save_toy_data, save_toy_model, train

pytestmark = pytest.mark.e2e

NOT_HERE = {
    "pip install 'dovetail[dashboard]'": "installs from the network",
    "make sglang-env": "installs from the network",
    "make demo": "installs from the network, then trains for minutes",
    "make test": "is what runs this",
    "python -m dovetail.trainer.sft_trainer": "a run on two devices; test_sft_runs has the entry",
}
"""Commands (or how they begin) that a machine without network cannot carry out."""
ELSEWHERE = {
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server": "tests/rollout_remote/servers.py",
    "dovetail train ... actor_rollout_ref.rollout.name=vllm": "tests/rollout_remote/test_training_run.py",
    "dovetail train actor_rollout_ref.rollout.name=sglang": "tests/rollout_sglang/test_training_run.py",
    "dovetail train run.yaml actor_rollout_ref.actor.router_replay.mode=R2": "tests/trainer/test_router_replay_runs.py",
}
"""Commands that these files take from the page, by `page_command`, and carry out."""
INSTEAD = {
    "--port 7000": "--port 0",
    "~/models/Qwen3-8B": "model",
    "~/models/Qwen3-0.6B": "model",
    "model.path=Qwen/Qwen2.5-1.5B-Instruct": "model.path=model",
    "model=Qwen/Qwen2.5-0.5B-Instruct": "model=model",
    "data=rows.jsonl": "data=toy/train.parquet",
    "reward=reward.py:score": "reward=toy/reward.py:compute_score",
    "data.train_batch_size=64": "data.train_batch_size=4",
    "--train 320 --test 64": "--train 20 --test 4",
    "ppo_mini_batch_size=64": "ppo_mini_batch_size=4",
    "rollout.n=8": "rollout.n=2",
    "trainer.n_gpus_per_node=8": "trainer.n_gpus_per_node=1",
    "--max-tokens 1024": "--max-tokens 8 data.max_prompt_length=256",
    "path=my_reward.py": "path=toy/reward.py",
}
REFUSED = ("dovetail check actor_rollout_ref.actor.clip_ratio_hgih=0.28",)
"""Commands that show what a mistake looks like."""

COMMANDS_OF_PAGES = page_commands()
HERE = [c for c in COMMANDS_OF_PAGES if not c.text.startswith((*NOT_HERE, *ELSEWHERE))]
RAW = [
    {"question": f"Two and two, {n} times?", "answer": f"<<2+2=4>>4, <<{n}*4={4 * n}>>{4 * n}\n#### {4 * n}"}
    for n in range(1, 9)
]
MATH_RAW = [{"problem": f"{n} halves?", "solution": rf"\boxed{{\frac{{{n}}}{{2}}}}"} for n in range(1, 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader of the pages is: a model, raw data and what the first commands make of it, finished runs."""
    folder = tmp_path_factory.mktemp("reader")
    save_toy_model(folder / "model")
    save_toy_data(folder / "toy")
    for name in ("train", "test"):
        (folder / "raw" / "gsm8k").mkdir(parents=True, exist_ok=True)
        (folder / "raw" / "gsm8k" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in RAW))
        write_rows(RAW, folder / "on_hub" / "gsm8k" / "main" / f"{name}-00000-of-00001.parquet")
        write_rows(MATH_RAW, folder / "on_hub" / "math" / "data" / f"{name}-00000-of-00001.parquet")
    put_in_cache(folder / "hub", GSM8K_SOURCE, folder / "on_hub" / "gsm8k", kind="dataset")
    put_in_cache(folder / "hub", MATH_SOURCE, folder / "on_hub" / "math", kind="dataset")
    raw, prepared = str(folder / "raw" / "gsm8k"), str(folder / "data" / "gsm8k")
    assert main(["data", "gsm8k", raw, "--out", prepared]) == 0
    pairs = ["--out", str(folder / "data" / "pairs"), "--pairs", "--levels", "2", "--train", "20", "--test", "4"]
    assert main(["data", "addition", *pairs]) == 0
    labels = [{"question": f"Which is number {n}?", "label": str(n)} for n in range(20)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labels))
    chats = [{"prompt": f"{n} + {n}?", "response": str(2 * n)} for n in range(8)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    toy = Toy(folder / "model", folder / "toy")
    keys = {
        "data.train_files": str(folder / "data" / "gsm8k" / "train.parquet"),
        "data.val_files": str(folder / "data" / "gsm8k" / "test.parquet"),
        "data.max_prompt_length": 256,
        "trainer.total_training_steps": 1,
        "trainer.save_freq": 1,
    }
    train(toy.config(folder / "runs" / "gsm8k", keys))
    for name in ("runs/demo", "run_a", "run_b"):
        write_run(folder / name, steps=3, rollouts_per_step=8)
    (folder / "DeepSeek-V3").mkdir()
    (folder / "DeepSeek-V3" / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    for block in (block for page in PAGES for block in blocks_of(page) if block.title is not None):
        (folder / str(block.title)).write_text(block.text)
    for launch_list in (ROOT / "tests" / "config" / "compat").glob("*.txt"):
        (folder / launch_list.name).symlink_to(launch_list)
    return folder


@pytest.fixture
def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DOVETAIL_LOGGING_LEVEL", "WARNING")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder


@pytest.mark.parametrize("command", HERE, ids=str)
def test_the_command_does_what_the_page_says(
    command: Command, reader: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = replaced(command).words
    assert words[0] == "dovetail", f"{command}: no way to carry it out here; is it one for NOT_HERE?"
    if words[1] == "dashboard":
        _ask_dashboard(words, reader)
        return
    words = _complete(words, replaced(command), reader)
    assert main(words[1:]) == (2 if command.text in REFUSED else 0), capsys.readouterr().err
    said = capsys.readouterr()
    _compare(command.shown, said.out + said.err)
    if words[1] == "data":
        assert (Path(words[words.index("--out") + 1]) / "train.parquet").exists()
    elif words[1] == "report":
        assert {"report.html", "report.png"} <= {file.name for file in Path(words[2]).iterdir()}
    elif words[1] == "eval":
        assert "eval.json" in said.out
    elif words[1] == "sft":
        assert RunFolder(reader / "run").read_metrics()[-1]["train/loss"] > 0
    elif words[1] == "train":
        [last] = RunFolder(reader / "run").read_metrics()[-1:]
        assert last["critic/score/mean"] >= 0
    elif words[1] in ("dpo", "reward"):
        [last] = RunFolder(reader / "run").read_metrics()[-1:]
        assert 0 < last["val/loss"] < 2


@pytest.mark.parametrize("command", [c for c in COMMANDS_OF_PAGES if c not in HERE], ids=str)
def test_a_command_that_is_not_carried_out_here_can_be_read(command: Command) -> None:
    words = command.words
    if words[0] == "dovetail":
        options = [word for word in words[2:] if word != REST_OF_KEYS]
        _parser(words[1]).parse_intermixed_args(options)
        load_config(overrides=[word for word in options if "=" in word])
    elif words[0] == "make":
        assert words[1] in _targets()
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", words[2])
        assert extras is not None
        assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    else:
        assert words[:2] == ["python", "-m"]
        assert importlib.util.find_spec(words[2]) is not None


@pytest.mark.parametrize("begin", [*NOT_HERE, *ELSEWHERE, *REFUSED])
def test_no_table_names_a_command_that_no_page_has(begin: str) -> None:
    assert any(command.text.startswith(begin) for command in COMMANDS_OF_PAGES)


@pytest.mark.parametrize("text", INSTEAD)
def test_no_replacement_is_for_something_that_no_page_says(text: str) -> None:
    assert any(text in command.text for command in COMMANDS_OF_PAGES)


@pytest.mark.parametrize(("begin", "file"), ELSEWHERE.items())
def test_a_command_that_is_carried_out_elsewhere_is_taken_from_the_page_there(begin: str, file: str) -> None:
    asked = re.findall(r'page_command\("([\w.]+)", "([^"]+)"\)', (ROOT / file).read_text())
    [command] = [command for command in COMMANDS_OF_PAGES if command.text.startswith(begin)]
    assert any(command.place.startswith(f"{page}:") and part in command.text for page, part in asked)


@pytest.mark.parametrize("command", commands_in_text(), ids=str)
def test_a_command_named_in_a_sentence_exists(command: Command) -> None:
    words = command.words
    if words[0] == "make":
        assert words[1] in _targets()
    elif words[0] == "python":
        assert importlib.util.find_spec(words[2]) is not None
    else:
        assert words[1] in COMMANDS
        known = _parser(words[1]).format_help()
        assert [option for option in re.findall(r"--[a-z-]+", command.text) if option not in known] == []


def replaced(command: Command) -> Command:
    text = command.text
    for old, new in INSTEAD.items():
        text = text.replace(old, new)
    return Command(command.place, text, command.shown)


def _complete(words: list[str], command: Command, reader: Path) -> list[str]:
    """A training command in this process, with what makes its run small; `...` gives way to the keys of a run."""
    trains = words[1] in ("train", "sft", "dpo", "reward", "distill")
    if not trains and REST_OF_KEYS not in words:
        return words
    toy = Toy(reader / "model", reader / "toy")
    # Prompts of a tokenizer of bytes are long.
    changes = {"data.max_prompt_length": 256, "trainer.total_training_steps": 2, **command.keys}
    changes.setdefault("trainer.resume_mode", "disable")  # commands share a folder, and some save a checkpoint
    keys = toy.arguments(reader / "run", changes)
    if "data.train_files" in command.keys:  # its own rule scores
        keys = [key for key in keys if not key.startswith("custom_reward_function.")]
    return [*words[:2], *keys, *(["--local"] if trains else [])]


def _ask_dashboard(words: list[str], reader: Path) -> None:
    """Start it, ask it once for its page and for its runs, end it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dovetail.cli.main", *words[1:]]
    process = subprocess.Popen(command, cwd=reader, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        address = said.split(" at ")[1].split()[0]
        with urllib.request.urlopen(address, timeout=60) as page:
            assert b"<html" in page.read()
        with urllib.request.urlopen(f"{address}/api/runs", timeout=60) as answer:
            runs = json.load(answer)
    finally:
        process.terminate()
        process.wait(60)
    asked = [word for word in words[2:] if (reader / word).is_dir()]
    names = {Path(name).name for name in asked} - {"runs"} | ({"demo"} if "runs" in asked else set())
    assert all(name in json.dumps(runs) for name in names), runs


def _compare(shown: str, said: str) -> None:
    """Every line of the page is in what was said; `...` stands for lines left out, spaces do not count."""
    flat = " ".join(said.split())
    for part in re.split(r"^\s*\.\.\.\s*$", shown, flags=re.MULTILINE):
        assert " ".join(part.split()) in flat


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
    return parser


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
