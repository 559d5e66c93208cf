"""Objects of a user's file: what the file may import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
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


def _score_with_a_late_import(folder: Path, word: str) -> Callable[[str], bool]:
    folder.mkdir()
    (folder / "late_neighbour.py").write_text(f"WORD = {word!r}\n")
    (folder / "reward.py").write_text(
        "def score(response):\n    import late_neighbour\n    return response == late_neighbour.WORD\n"
    )
    return load_user_object(str(folder / "reward.py"), "score", key="custom_reward_function.path")


def test_a_function_may_import_what_lies_beside_its_file_when_it_is_called(tmp_path: Path) -> None:
    before = list(sys.path)
    assert _score_with_a_late_import(tmp_path / "a", "good")("good")
    assert sys.path == before
    del sys.modules["late_neighbour"]
    with pytest.raises(ModuleNotFoundError):  # code that lies elsewhere does not see the user's folder
        importlib.import_module("late_neighbour")


def test_the_next_run_has_its_own_neighbours_of_the_same_name(tmp_path: Path) -> None:
    assert _score_with_a_late_import(tmp_path / "a", "first")("first")
    assert _score_with_a_late_import(tmp_path / "b", "second")("second")
    assert load_user_object(str(tmp_path / "a" / "reward.py"), "score", key="custom_reward_function.path")("first")
