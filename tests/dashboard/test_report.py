"""`dovetail report`: one file that needs nothing else, and a picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from dovetail.api.run import Run
from dovetail.cli.main import main
from dovetail.dashboard import report
from dovetail.dashboard.run_files import DashboardError, MetricsTable
from dovetail.observability.run_folder import RunFolder
from tests.dashboard.synthetic import line, validation_row, write_config, write_run

pytestmark = pytest.mark.unit


def test_a_report_is_complete_in_itself_and_escapes_what_the_model_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run<i>", steps=300, rollouts_per_step=8)
    nasty = validation_row(300, 0) | {"response": "<script>alert(1)</script> & more"}
    rows = [nasty, *(validation_row(300, index) for index in range(1, 6))]
    (run / "validation" / "step_300.jsonl").write_text("".join(line(row) for row in rows))
    assert main(["report", str(run), "--out", str(tmp_path / "sent" / "me.html")]) == 0
    html = (tmp_path / "sent" / "me.html").read_text()
    assert capsys.readouterr().out.split() == [str(tmp_path / "sent" / name) for name in ("me.html", "me.png")]
    assert (tmp_path / "sent" / "me.png").read_bytes().startswith(b"\x89PNG")
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in html
    assert "<script" not in html
    assert "<i>" not in html.replace("<i>Try:</i>", "")
    assert "run&lt;i&gt;" in html
    assert html.count("<svg") == 9
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", html)
    for words in (
        "At step 10 I say 1.",
        "toy/acc/mean@1",
        "<th>share truncated</th>",
        "<td>0.0625</td>",
        "trainer.total_training_steps",
        "is generation, then",
    ):
        assert words in html
    assert len(html) < 1_000_000


def test_a_report_refuses_in_words_what_it_cannot_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path / "runs" / "a", {})
    assert main(["report", str(tmp_path / "runs" / "a")]) == 2
    assert capsys.readouterr().err.endswith("no finished step yet; there is nothing to report.\n")
    RunFolder(tmp_path / "runs" / "a").write_now(step=0, phase=None, failed="It failed at the start: no memory.")
    assert main(["report", str(tmp_path / "runs" / "a")]) == 2
    assert "nothing to report. It failed at the start: no memory." in capsys.readouterr().err
    write_config(tmp_path / "runs" / "b", {})
    assert main(["report", str(tmp_path / "runs")]) == 2
    assert "holds 2 runs (a, b); a report is about one" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "runs" / "a"), "--out", str(tmp_path / "x.pdf")]) == 2
    assert "must end in .html" in capsys.readouterr().err
    # From Python, too: the page would replace its own picture.
    with pytest.raises(DashboardError, match=r"must end in \.html"):
        Run(tmp_path / "runs" / "a").report(tmp_path / "x.png")


def test_shares_begin_at_zero_as_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bottoms = {}
    draw = report._draw

    def watched(axes: Axes, table: MetricsTable, names: list[str], *, share: bool) -> None:
        draw(axes, table, names, share=share)
        bottoms[names[0]] = axes.get_ylim()[0]

    monkeypatch.setattr(report, "_draw", watched)
    run = write_run(tmp_path / "run", steps=30, rollouts_per_step=8)
    assert main(["report", str(run)]) == 0
    assert bottoms["response_length/clip_ratio"] == 0.0
    assert bottoms["actor/grad_norm"] > 0.0
