"""Calls that cannot work end with a few lines that name the value and the fix, exit code 2, and no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.cli.main import main
from tests.trainer.toy_run import Toy

pytestmark = pytest.mark.e2e

CALLS = {
    "train --local model=/nope data=rows.jsonl reward=r.py:f": "custom_reward_function.path=r.py: there is no file",
    "train modle=/nope": "modle is not a known key; did you mean model?",
    "eval /nope": "/nope is no folder; give a folder of a model (with its config.json), a name on the hub (org/name)",
    "generate /nope hello": "/nope is no folder; give a folder of a model",
    "export /nope out": "/nope is no folder; give a global_step_N folder",
    "audit /nope": "/nope does not exist",
    "audit run": "run has no checkpoints",
    "replay /nope": "/nope is no run folder: its config.yaml cannot be read (No such file or directory); give the",
    "replay run": "run/config.yaml is not the configuration of a run; give the folder of one.",
    "dashboard run --port 99999": "--port: '99999' is no whole number from 0 to 65,535.",
    "report file": "is a file; give the run folder",
    "data addition --levels 2 --train 10 --test 5 --out file/x": "--out: file/x cannot be written:",
    "check --device-memory-gib -1": "'-1' is no number above 0.",
    "check --device-memory-gib nan": "'nan' is no number above 0.",
    "generate {model} hello --jsonl run": "--jsonl: run cannot be written: it is a folder, not a file.",
    "generate {model} hello --jsonl file/x": "/file is not a folder.",
    "generate {model} hello -n 0": "'0' is no whole number from 1",
    "generate {model} hello --temperature -1": "'-1' is no number of at least 0.",
    "eval {model} --out file": "--out: file cannot be written: it is a file, not a folder.",
    "eval {model} --max-tokens -5": "'-5' is no whole number from 1",
    "report run --out file/x.html": "/file is not a folder.",
    "export run file/x": "/file is not a folder.",
    "replay run --out link/x": "/link is a link to nothing.",
    "demo --out file": "it is a file, not a folder.",
    "demo --steps 0": "'0' is no whole number from 1",
    "doctor --devices 0": "'0' is no whole number from 1 to 64.",
    "doctor --devices -2": "'-2' is no whole number from 1 to 64.",
    "doctor --cluster --limit 0": "'0' is no number above 0.",
    "doctor --svg file/x": "/file is not a folder.",
    "bench --steps -1": "'-1' is no whole number from 1",
    "data addition --out x --train 0": "'0' is no whole number from 1",
    "data jsonl rows.jsonl --out x --test-share 2": "'2' is no number of at least 0 and at most 1.",
    "check --no-files {toy} --like run": "--like run predicts an asynchronous run; set async_training.mode",
    "train --local {toy} reward=gms8k": "reward=gms8k: there is no reward rule 'gms8k'. Did you mean gsm8k?",
    "check {toy} reward=[exact,gms8k]": "reward=gms8k: there is no reward rule 'gms8k'. Did you mean gsm8k?",
    "check {toy} reward=gms8k": "reward=gms8k: there is no reward rule 'gms8k'. Did you mean gsm8k?",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_says_what_to_change(
    call: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(json.dumps({"trainer": {}}))
    own = [argument for argument in toy.arguments(tmp_path / "out") if "reward" not in argument or "gms8k" not in call]
    words = call.replace("{model}", str(toy.model)).split()
    arguments = [part for word in words for part in (own if word == "{toy}" else [word])]
    try:
        code = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    shown = " ".join((said := "".join(capsys.readouterr())).split())
    assert code == 2
    assert CALLS[call] in shown
    assert "Traceback" not in said
    assert arguments[0] == "check" or len(said.splitlines()) < 8
