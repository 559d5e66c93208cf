"""The judge of the guide, in scoring processes, against a stand-in for a server with OpenAI's API."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.rewards.errors import Failure
from dovetail.rewards.functions import FunctionSpec
from dovetail.rewards.pool import KillablePool
from tests.docs.blocks import blocks_of

pytestmark = pytest.mark.e2e

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "reward.md"
AT_ONCE = 6


class Server(http.server.ThreadingHTTPServer):
    """Replies when `AT_ONCE` requests are there together: a client that asks one after the other gets nothing."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.together = threading.Barrier(AT_ONCE)
        self.seen: list[tuple[str, str | None, dict[str, Any]]] = []


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        self.server.together.wait(30)
        asked = body["messages"][0]["content"]
        status, said = (500, "") if "broken" in asked else (200, "I will not." if "odd" in asked else " 8\n")
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        """Not into the output of the tests."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("JUDGE_KEY", "secret")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_judge_of_the_guide_scores_many_responses_at_a_time(server: Server, tmp_path: Path) -> None:
    (block,) = (block for block in blocks_of(GUIDE) if block.title == "judge.py")
    (tmp_path / "judge.py").write_text(block.text)
    function = FunctionSpec(str(tmp_path / "judge.py"), "score", {"model": "my-judge"})
    pool = KillablePool([function], num_workers=1, timeout_seconds=60, async_calls=AT_ONCE)
    try:
        answers = ["4", "5", "6", "7", "odd", "broken"]
        calls = [
            {
                "data_source": "d",
                "solution_str": answer,
                "ground_truth": None,
                "extra_info": {"prompt": [{"role": "user", "content": "2+2?"}]},
            }
            for answer in answers
        ]
        outcomes = [future.result(60) for future in [pool.submit(call) for call in calls]]
    finally:
        pool.close()
    assert outcomes[:4] == [{"score": 0.8}] * 4
    odd, broken = outcomes[4:]
    assert isinstance(odd, Failure)
    assert "no grade in 'I will not.'" in odd.detail
    assert isinstance(broken, Failure)
    assert "500 Internal Server Error" in broken.detail
    path, key, body = server.seen[0]
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer secret", "my-judge")
    assert "Question: 2+2?" in body["messages"][0]["content"]
