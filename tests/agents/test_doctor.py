"""`dovetail doctor --agents MODEL`: the audit of a chat template, for people and for scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.cli.main import main
from tests.agents.tokenizers import family_tokenizer

pytestmark = pytest.mark.unit


def _shown(family: str, folder: Path, capsys: pytest.CaptureFixture[str], *items: str) -> tuple[int, str]:
    family_tokenizer(family).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    code = main(["doctor", "--agents", str(folder), *items])
    return code, " ".join(capsys.readouterr().out.split())


def test_an_append_only_template_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = _shown("qwen2.5", tmp_path, capsys)
    assert code == 0
    assert "✓ a result after a call" in shown
    assert "✗" not in shown
    assert "an answer ends with <|im_end|>" in shown
    assert "append-only: each trajectory is one row" in shown


def test_a_template_that_drops_thinking_fails_with_the_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = _shown("qwen3", tmp_path, capsys)
    assert code == 1
    assert "✗ independence" in shown
    assert "✓ prefix" in shown
    assert "✗ a user's message after an answer with thinking independence: '<think>" in shown
    assert "a trajectory goes on in a new row" in shown


def test_arguments_of_the_template_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, shown = _shown("qwen3", tmp_path, capsys, "+data.apply_chat_template_kwargs.enable_thinking=False")
    assert "✗ generation prompt" in shown


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--agents", str(tmp_path)]) == 1
    assert "cannot be audited" in " ".join(capsys.readouterr().out.split())
