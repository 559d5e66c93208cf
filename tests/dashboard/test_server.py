"""The server shows its runs and nothing else: no other file, no other host, no traceback."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from dovetail.cli.main import main
from dovetail.dashboard import runs
from dovetail.dashboard.app import HOST, bind, build_app, plotly_file
from dovetail.dashboard.runs import Run, Runs
from dovetail.observability.run_folder import RunFolder
from tests.dashboard.synthetic import answer_row, line, metrics_row, write_async_run, write_config, write_run

pytestmark = pytest.mark.unit
PAGE = Path(__file__).parents[2] / "dovetail" / "dashboard" / "page"


def client(*folders: Path) -> TestClient:
    return TestClient(build_app(Runs(folders)), base_url="http://127.0.0.1", raise_server_exceptions=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text("not yours")
    return write_run(tmp_path / "run")


# ---- what may be read ----


@pytest.mark.parametrize(
    "path",
    [
        *("/api/overview?run=../secret.txt", "/api/overview?run=..", "/api/overview?run=/etc", "/api/overview?run="),
        *("/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page//etc/passwd", "/../../etc/passwd"),
        *(
            "/api/groups?run=run&step=../../secret",
            "/api/groups?run=run&step=1&kind=../",
            "/api/steps?run=run&kind=data",
        ),
        *("/api/groups?run=run&step=-1", "/api/groups?run=run&step=99999", "/api/answer?run=run&step=1&row=10000"),
        *("/openapi.json", "/docs", "/api/nothing"),
    ],
)
def test_other_paths_are_refused_in_words(run: Path, path: str) -> None:
    answer = client(run).get(path)
    assert answer.status_code in (404, 422)
    assert set(answer.json()) == {"error"}
    assert "not yours" not in answer.text
    assert "Traceback" not in answer.text


def test_a_link_out_of_the_run_folder_is_not_followed(run: Path) -> None:
    (run.parent / "elsewhere.jsonl").write_text(line(answer_row(1, 0, response="not yours")))
    (run / "rollouts" / "step_1.jsonl").unlink()
    os.symlink(run.parent / "elsewhere.jsonl", run / "rollouts" / "step_1.jsonl")
    answer = client(run).get("/api/groups?run=run&step=1")
    assert answer.status_code == 403
    assert answer.json() == {"error": "step_1.jsonl leads out of the run folder and is not read."}


def test_a_linked_metrics_file_or_config_is_not_followed(run: Path) -> None:
    for name in ("metrics.jsonl", "config.yaml"):
        os.replace(run / name, run.parent / name)
        os.symlink(run.parent / name, run / name)
    assert client(run).get("/api/overview?run=run").status_code == 403
    assert client(run).get("/api/config?run=run").status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:80", ""])
def test_a_foreign_host_name_is_refused(run: Path, host: str) -> None:
    answer = client(run).get("/api/runs", headers={"host": host})
    assert answer.status_code == 421
    assert "this machine only" in answer.json()["error"]


@pytest.mark.parametrize("host", ["127.0.0.1:6262", "localhost:8080", "localhost", "[::1]:6262"])
def test_this_machine_by_any_of_its_names_is_served(run: Path, host: str) -> None:
    assert client(run).get("/api/runs", headers={"host": host}).status_code == 200


def test_only_reading_is_allowed_and_headers_forbid_the_rest(run: Path) -> None:
    assert client(run).post("/api/runs").status_code == 405
    headers = client(run).get("/").headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


def test_the_server_listens_on_this_machine_alone() -> None:
    with bind(0) as listening:
        assert listening.getsockname()[0] == HOST == "127.0.0.1"


def test_an_error_of_the_dashboard_itself_shows_no_traceback(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Run) -> None:
        raise RuntimeError("inner matters at /some/path")

    monkeypatch.setattr(Run, "status", fail)
    answer = client(run).get("/api/overview?run=run")
    assert answer.status_code == 500
    assert answer.json() == {"error": "the dashboard failed to answer; its log in the terminal says why."}


def test_the_page_asks_nobody_else_and_sets_no_html() -> None:
    for file in PAGE.iterdir():
        text = file.read_text()
        links = [link for link in re.findall(r"(?:https?:)?//[\w.]+\.\w+", text) if "www.w3.org" not in link]
        assert links == [], file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), file.name
    assert plotly_file().stat().st_size > 1_000_000


# ---- bad folders ----


def test_a_folder_of_something_else_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    assert (
        main(["dashboard", str(tmp_path / "photos"), str(tmp_path / "nowhere"), str(tmp_path / "photos" / "cat.jpg")])
        == 2
    )
    said = capsys.readouterr().err
    assert "photos: is no run folder. It holds neither metrics.jsonl nor config.yaml" in said
    assert "nowhere: there is no such folder" in said
    assert "cat.jpg: is a file" in said
    assert "Traceback" not in said


def test_a_run_that_is_being_created_says_so_and_then_appears(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    page = client(tmp_path / "new")
    assert page.get("/api/runs").json()[0]["message"] == "The folder is empty so far: the run is still being created."
    assert page.get("/api/overview?run=new").json()["charts"] == []  # nothing is missed yet
    assert "no config.yaml" in page.get("/api/config?run=new").json()["error"]
    write_config(tmp_path / "new", {"trainer": {"total_training_steps": 5}})
    assert "No step is finished yet" in page.get("/api/runs").json()[0]["message"]
    (tmp_path / "new" / "metrics.jsonl").write_text(line(metrics_row(1)) + line(metrics_row(2))[:20])
    status = page.get("/api/runs").json()[0]
    assert (status["step"], status["total_steps"], status["message"]) == (1, 5, None)


def test_a_run_is_finished_when_it_says_so_and_stopped_when_its_process_is_gone_without_a_word(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start()
    folder.log_metrics(0, {"val-core/toy/acc/mean@1": 0.5})
    page = client(folder.path)
    gone = {"step": 0, "total_steps": None, "host": socket.gethostname(), "pid": 2**22 + 1}
    for facts, state in (
        ({"phase": "start", "finished": False}, "stopped"),
        ({"phase": None, "finished": False}, "stopped"),
        ({"phase": None, "finished": True}, "finished"),
    ):
        (folder.path / "now.json").write_text(line({**gone, **facts}))
        status = page.get("/api/runs").json()[0]
        assert (status["state"], status["step"], status["total_steps"]) == (state, 0, None)


def test_a_run_that_was_asked_to_stop_is_stopped_while_its_process_lives_and_nothing_is_wrong(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    here = {"step": 4, "total_steps": 9, "phase": None, "host": socket.gethostname(), "pid": os.getpid()}
    for stopped, state in ((False, "running"), (True, "stopped")):
        (run / "now.json").write_text(line({**here, "finished": False, "stopped": stopped}))
        reply = client(run).get("/api/overview?run=run").json()
        assert reply["status"]["state"] == state
        assert not any("process is gone" in warning["evidence"] for warning in reply["warnings"])


def test_a_run_that_waits_says_for_whom_and_one_that_failed_says_why(tmp_path: Path) -> None:
    run = write_async_run(tmp_path / "run", steps=4)
    here = {"step": 5, "total_steps": 9, "host": socket.gethostname(), "pid": os.getpid(), "time": 70.0, "since": 60.0}
    words = "the trainer waits for draw 12 for 10 s; draw 12 waits for its score for 10 s"
    (run / "now.json").write_text(line({**here, "phase": "gen", "waits": words}))
    status = client(run).get("/api/async?run=run").json()["status"]
    assert (status["phase"], status["phase_since"], status["waits"]) == ("waiting for groups", 60.0, words)
    failed = f"It failed in phase 'gen' of step 5: no progress for 300 s: {words}."
    (run / "now.json").write_text(line({**here, "phase": None, "failed": failed}))
    reply = client(run).get("/api/overview?run=run").json()
    assert (reply["status"]["state"], reply["status"]["message"]) == ("stopped", failed)
    assert reply["warnings"][0]["evidence"] == f"The last step is 4 of 9. {failed}"


def test_what_a_run_does_now_is_said_in_the_words_of_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    here = {"step": 4, "total_steps": 9, "host": socket.gethostname(), "pid": os.getpid(), "time": 1.0}
    for phase, words in (("gen", "generation"), ("init_models", "init models")):
        (run / "now.json").write_text(line({**here, "phase": phase}))
        assert client(run).get("/api/runs").json()[0]["phase"] == words


@pytest.mark.parametrize(
    ("metrics", "cards", "charts"),
    [
        ({"train/loss": 2.0, "val/loss": 2.1}, ["loss", "validation loss"], {"loss"}),
        (
            {
                "train/loss": 0.7,
                "train/rewards/accuracies": 1.0,
                "train/rewards/margins": 0.1,
                "train/logps/chosen": -4.0,
            },
            ["loss", "pairs in order"],
            {"loss", "preferences", "margins", "logps"},
        ),
        (
            {"train/loss": 0.7, "train/accuracy": 0.5, "val/accuracy": 0.5},
            ["loss", "pairs in order"],
            {"loss", "preferences"},
        ),
    ],
    ids=["sft", "dpo", "reward"],
)
def test_a_run_of_another_method_shows_what_it_records_and_misses_nothing_of_rl(
    metrics: dict[str, float], cards: list[str], charts: set[str], tmp_path: Path
) -> None:
    rows = [{"step": step, **metrics} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(line(row) for row in rows))
    write_config(tmp_path, {})
    reply = client(tmp_path).get(f"/api/overview?run={tmp_path.name}").json()
    assert [card["title"] for card in reply["cards"]] == cards
    assert {chart["key"] for chart in reply["charts"]} == charts
    assert all(chart["lines"] for chart in reply["charts"])


def test_broken_and_missing_files_are_messages(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("half a li\n")
    (run / "plan.json").write_text("{")
    (run / "now.json").write_text("[")
    (run / "events.jsonl").write_bytes(b"\xff\xfe\n")
    (run / "timeline.jsonl").unlink()
    (run / "rollouts" / "step_2.jsonl").write_bytes(b"\x00\xff not json\n" + line(answer_row(2, 0)).encode())
    page = client(run)
    assert "1 lines of metrics.jsonl are not whole" in page.get("/api/runs").json()[0]["message"]
    assert page.get("/api/groups?run=run&step=2").json()["bad_lines"] == 1
    assert page.get("/api/time?run=run").json()["timeline_steps"] is None
    assert page.get("/api/timeline?run=run&step=1").json() == {"error": "step 1 has no timeline."}
    for name in ("rollouts", "validation"):
        for file in (run / name).iterdir():
            file.unlink()
        (run / name).rmdir()
    assert page.get("/api/steps?run=run").json() == {"steps": [], "numbers": []}
    assert page.get("/api/groups?run=run&step=2").json() == {"error": "there is no rollouts/step_2.jsonl in this run."}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("metrics.jsonl", '{"step": 1, "critic/score/mean": 1' + "0" * 400 + "}\n"),
        ("metrics.jsonl", '{"step": 99999999999999999999}\n'),
        ("now.json", '{"total_steps": "many", "pid": "x", "phase": 3}'),
        ("timeline.jsonl", '{"step": 1, "spans": 3}\n'),
        ("events.jsonl", '{"step": 1, "kind": "resume", "changed": {"trainer.seed": 2}}\n'),
        ("rollouts/step_1.jsonl", r'{"prompt": "\ud800", "response": "\udfff", "uid": "\ud800", "score": 1}'),
    ],
)
def test_a_value_that_no_run_writes_hides_neither_its_run_nor_another(run: Path, file: str, text: str) -> None:
    """From another program, or half a character of a model."""
    write_run(run.parent / "other", steps=2)
    (run / file).write_text(text)
    page = client(run, run.parent / "other")
    assert [one["name"] for one in page.get("/api/runs").json()] == ["run", "other"]
    for place in ("overview?", "time?", "health?", "steps?", "timeline?step=1&", "groups?step=1&"):
        reply = page.get(f"/api/{place}run=run")
        assert reply.status_code in (200, 404), (place, reply.text)


def test_a_folder_that_disappears_is_a_message(run: Path) -> None:
    page = client(run)
    os.rename(run, run.parent / "moved")
    assert page.get("/api/overview?run=run").status_code == 410
    assert page.get("/api/runs").json()[0]["state"] == "gone"


def test_a_folder_of_runs_shows_all_of_them_and_new_ones(tmp_path: Path) -> None:
    for name in ("a/x", "b/x"):
        write_run(tmp_path / name, steps=3)
    page = client(tmp_path)
    assert [run["name"] for run in page.get("/api/runs").json()] == ["a/x", "b/x"]
    write_run(tmp_path / "c", steps=3)
    assert [run["name"] for run in page.get("/api/runs").json()] == ["a/x", "b/x", "c"]
    same_names = client(tmp_path / "a" / "x", tmp_path / "b" / "x")
    assert [run["name"] for run in same_names.get("/api/runs").json()] == ["x", "b/x"]


def test_runs_beyond_the_most_that_are_listed_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_MOST_RUNS", 2)
    for name in "abcd":
        write_config(tmp_path / name, {})
    page = client(tmp_path, tmp_path)  # a folder that is given twice is counted once
    assert [run["name"] for run in page.get("/api/runs").json()] == ["a", "b"]
    assert page.get("/api/pulse?run=a").json()["num_not_listed"] == 2
