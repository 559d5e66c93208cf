"""Objects of a user's file: what the file may import."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dovetail.config.user_code import load_user_object

pytestmark = pytest.mark.unit


def test_a_file_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    before = list(sys.path)
    (tmp_path / "beside_a_reward.py").write_text("WORD = 'good'\n")
    file = tmp_path / "reward.py"
    file.write_text("import beside_a_reward\ndef score(response): return response == beside_a_reward.WORD\n")
    assert load_user_object(str(file), "score", key="custom_reward_function.path")("good")
    assert sys.path == before, "modules of this folder would hide those of the next run's"


def test_a_file_that_adds_its_folder_to_the_path_keeps_it_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "imported_when_called.py").write_text("WORD = 'good'\n")
    file = tmp_path / "late.py"
    file.write_text(
        "import os, sys\n"
        "folder = os.path.dirname(__file__)\n"
        "if folder not in sys.path:\n    sys.path.append(folder)\n"
        "def score(response):\n"
        "    from imported_when_called import WORD\n"
        "    return response == WORD\n"
    )
    assert load_user_object(str(file), "score", key="custom_reward_function.path")("good")
