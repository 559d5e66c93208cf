"""The wheel has everything that the source has, and works where nothing else of the project is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[1]


def _run(*words: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_wheel_is_built_installed_and_used(tmp_path: Path) -> None:
    """Over 10 s on a busy machine: only an installation shows that the command and the data files come along."""
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(ROOT / "dovetail", source / "dovetail", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    wanted = {str(file.relative_to(source)) for file in (source / "dovetail").rglob("*") if file.is_file()}
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _run(*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", "dist", ".", cwd=source)
    (wheel,) = (source / "dist").glob("dovetail-*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert {name for name in file.namelist() if not name.partition("/")[0].endswith(".dist-info")} == wanted
    _run(*pip, "install", "--no-deps", "--no-index", "--no-compile", "--target", str(site), str(wheel), cwd=tmp_path)
    here = {"PYTHONPATH": str(site)}
    command = str(site / "bin" / "dovetail")
    assert "dovetail <command> --help says more" in _run(command, "--help", cwd=tmp_path, **here)
    _run(command, "data", "addition", "--train", "8", "--test", "2", "--out", "data", cwd=tmp_path, **here)
    where = _run(sys.executable, "-c", "import dovetail; print(dovetail.__file__)", cwd=tmp_path, **here)
    assert where.startswith(str(site))
