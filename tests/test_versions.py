"""The extras allow the versions that the code accepts, and no others."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dovetail.backends.megatron import versions as megatron
from dovetail.rollout.base import EngineError
from dovetail.rollout.sglang import environment as sglang
from dovetail.rollout.sglang.serve import is_supported
from dovetail.rollout.vllm import environment as vllm

pytestmark = pytest.mark.unit


def megatron_accepts(version: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(megatron.metadata, "version", lambda name: version)
    try:
        megatron.check_version()
    except ImportError:
        return False
    return True


def sglang_accepts(version: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    return is_supported(version, list(sglang.OLDEST), list(sglang.NEWEST))


def vllm_accepts(version: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    try:
        vllm.check_version(version)
    except EngineError:
        return False
    return True


def releases(minors: range, patches: range) -> list[str]:
    return [f"0.{minor}.{patch}" for minor in minors for patch in patches]


@pytest.mark.parametrize(
    ("extra", "package", "accepts", "candidates"),
    [
        ("megatron", "megatron-core", megatron_accepts, releases(range(12, 22), range(3))),
        ("sglang", "sglang", sglang_accepts, releases(range(4, 7), range(40))),
        ("vllm", "vllm", vllm_accepts, releases(range(20, 40), range(3))),
    ],
)
def test_an_extra_allows_what_the_code_accepts(
    monkeypatch: pytest.MonkeyPatch,
    extra: str,
    package: str,
    accepts: Callable[[str, pytest.MonkeyPatch], bool],
    candidates: list[str],
) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (wanted,) = [
        found for line in project["optional-dependencies"][extra] if (found := Requirement(line)).name == package
    ]
    allowed = [release for release in candidates if wanted.specifier.contains(release)]
    assert allowed == [release for release in candidates if accepts(release, monkeypatch)]
    assert 0 < len(allowed) < len(candidates)
