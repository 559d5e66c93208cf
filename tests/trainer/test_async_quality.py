"""`benchmarks.async_quality`: a run of a stale side becomes a line, a row of the table and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import async_quality

pytestmark = pytest.mark.e2e


def test_a_run_becomes_a_line_a_row_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes some 10 s: only a run of its own shows that the side's keys, the clock and the metrics' names still fit."""
    monkeypatch.setattr(async_quality, "NUM_SUPERVISED", 128)
    monkeypatch.setattr(async_quality, "NUM_TEST", 8)
    out, side = tmp_path / "curves.jsonl", "fully_async-1/tis"
    arguments = [str(out), "--sides", side, "--seeds", "0", "--steps", "3", "--folder", str(tmp_path / "workload")]
    async_quality.main([*arguments, "--supervised-steps", "2", "--goal", "0"])
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert (line["side"], line["seed"]) == (side, 0)
    assert [point[0] for point in line["points"]] == [0, 3]
    seconds, processor_seconds = line["points"][1][1:3]
    assert seconds > 0
    assert processor_seconds > 0
    assert 0 < line["staleness"] <= 1, "nothing stale was trained on; the side shows nothing"
    assert f"| `{side}` | 1 |" in capsys.readouterr().out
    async_quality.main([*arguments, "--draw", str(tmp_path / "curves.png")])
    assert len(out.read_text().splitlines()) == 1
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
