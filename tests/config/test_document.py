"""docs/configuration.md is what the schema says."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.config import DovetailConfig
from dovetail.config.document import document, main
from dovetail.config.keys import catalogue

pytestmark = pytest.mark.unit

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_document_is_up_to_date() -> None:
    assert main(["--check", str(DOCUMENT)]) == 0


def test_the_document_names_every_key() -> None:
    text = document()
    assert [key for key in catalogue(DovetailConfig) if f"`{key}`" not in text] == []


def test_an_old_document_is_refused_with_the_command_that_renews_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "configuration.md"
    assert main(["--check", str(path)]) == 1
    assert f"python -m dovetail.config.document {path}" in capsys.readouterr().err
    assert main([str(path)]) == 0
    assert main(["--check", str(path)]) == 0
