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
    "audit /nope": "/nope has no checkpoints",
    "replay /nope": "/nope is no run folder: its config.yaml cannot be read (No such file or directory); give the",
    "replay run": "run/config.yaml is not the configuration of a run; give the folder of one.",
    "dashboard run --port 99999": "port 99999 cannot be used: ports are 0 to 65535; leave --port out",
    "report file": "is a file; give the run folder",
    "data addition --levels 2 --train 10 --test 5 --out file/x": "file/x: Not a directory; give a path that",
    "check --device-memory-gib -1": "'-1' is no size in GiB above 0",
    "check --no-files {toy} --like run": "--like run predicts an asynchronous run; set async_training.mode",
    "train --local {toy} reward=gms8k": "reward=gms8k: there is no reward rule 'gms8k'; did you mean gsm8k?",
    "check {toy} reward=gms8k": "reward=gms8k: there is no reward rule 'gms8k'; did you mean gsm8k?",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_says_what_to_change(
    call: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(json.dumps({"trainer": {}}))
    own = [argument for argument in toy.arguments(tmp_path / "out") if "reward" not in argument or "gms8k" not in call]
    arguments = [part for word in call.split() for part in (own if word == "{toy}" else [word])]
    try:
        code = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    shown = " ".join((said := "".join(capsys.readouterr())).split())
    assert code == 2
    assert CALLS[call] in shown
    assert "Traceback" not in said
    assert arguments[0] == "check" or len(said.splitlines()) < 8
