"""The table of models says what the checks say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers

from tools import model_table

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "models.md"


@pytest.mark.skipif(
    not transformers.__version__.startswith(f"{model_table._TRANSFORMERS}."), reason="the page is of another release"
)
def test_the_table_is_up_to_date_and_an_old_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert model_table.main(["--check", str(PAGE)]) == 0
    old = shutil.copy(PAGE, tmp_path)
    monkeypatch.setattr(model_table, "_ROWS", model_table._ROWS[:1])
    assert model_table.main(["--check", str(old)]) == 1
    assert f"run `python -m tools.model_table {old}`" in capsys.readouterr().err


def test_cells_of_vllm_are_kept_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_table, "_version", lambda name: "")
    page = PAGE.read_text()
    assert model_table._vllm_cells(page)("Qwen3", "Qwen3ForCausalLM") == "yes"
    assert model_table._vllm_cells(page)("Llama 4", "-") == ""
