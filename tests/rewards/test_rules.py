"""Each rule on answers whose verdict is plain to a reader."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any

import pytest

from dovetail.config import DovetailConfig
from dovetail.rewards.build import reward_specs, scoring_processes
from dovetail.rewards.pool import KillablePool
from dovetail.rewards.registry import RULES, default_compute_score, find_rule
from dovetail.rewards.rules import arithmetic, code, countdown, exact, gsm8k, latex, math, multiple_choice
from dovetail.rewards.rules.extract import find_numbers, last_boxed
from dovetail.rewards.sandbox import LocalSandbox, RemoteSandbox, SandboxUnavailable

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("answer", "method", "score"),
    [
        ("so 9 * 2 = 18\n#### 18", "strict", 1.0),
        ("#### $1,018", "strict", 0.0),
        ("#### 18.0", "strict", 0.0),
        ("the answer is 18.", "strict", 0.0),
        ("the answer is $18.", "flexible", 1.0),
        ("18 eggs, of which 3 are eaten", "flexible", 0.0),
        ("3 hours at 6 km/h, so 18km", "flexible", 1.0),
        ("it is 18.5km", "flexible", 0.0),
        ("1e18", "flexible", 0.0),
        ("no idea", "flexible", 0.0),
    ],
)
def test_gsm8k_reads_the_marked_or_the_last_number(answer: str, method: Any, score: float) -> None:
    assert gsm8k.compute_score(answer, "18", method=method)["score"] == score


def test_gsm8k_takes_thousands_separators_on_both_sides() -> None:
    assert gsm8k.compute_score("#### 70,000", "70000")["acc"] == 1.0
    assert gsm8k.compute_score("#### 70000", "70,000")["acc"] == 1.0


def test_a_minus_between_two_numbers_is_no_sign() -> None:
    assert find_numbers("5-3 = 2 and -7, 1,234.5 x2") == ["5", "3", "2", "-7", "1234.5"]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\fbox{3} and \boxed 7$", "7"),
        (r"\boxed{unclosed", None),
        ("none", None),
    ],
)
def test_the_last_balanced_box_counts(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\dfrac{1}{2}", "0.5"),
        (r"\frac12", "1/2"),
        (r"-\frac{3}{4}", "-0.75"),
        (r"1\frac{1}{2}", "1.5"),
        ("1,234", "1234"),
        (r"90^\circ", "90"),
        (r"x=5", "5"),
        (r"\left( 3, \frac{1}{2} \right)", "(3,0.5)"),
        (r"\text{east}", "East"),
        (r"50\%", "50"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"12 \text{ cm}", "12"),
        ("(10,100)", r"\left( 10, 100 \right)"),
        (r"\{1,200\}", r"\{1, 200\}"),
    ],
)
def test_spellings_of_one_answer_agree(left: str, right: str) -> None:
    assert latex.same_answer(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1", "2"),
        ("(1,2)", "(2,1)"),
        ("[1,2)", "[1,2]"),
        (r"\frac{1}{0}", "1"),
        ("", ""),
        ("x", "y"),
        ("1,2", "12"),
        ("12.5", "12,5"),
        ("(10,100)", "(10100)"),
    ],
)
def test_different_answers_differ(left: str, right: str) -> None:
    assert not latex.same_answer(left, right)


def test_math_reads_boxes_and_answer_lines() -> None:
    assert math.compute_score(r"thus \boxed{0.5}", r"\frac{1}{2}", use_math_verify=False)["score"] == 1.0
    assert math.compute_score("So\nAnswer: $42$", "42", use_math_verify=False)["score"] == 1.0
    assert math.compute_score("I do not know", "42", wrong=-1.0) == {"score": -1.0, "acc": 0.0, "pred": ""}


def test_math_takes_the_box_of_a_worked_solution_as_the_truth() -> None:
    assert math.compute_score(r"\boxed{7}", r"Adding, we get \boxed{7}.", use_math_verify=False)["acc"] == 1.0


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("The answer is (C).", "C", 1.0),
        (r"\boxed{\text{B}}", "B", 1.0),
        ("Option A looks right, but the answer: D", "D", 1.0),
        ("I think\nB", "B", 1.0),
        ("I'm not sure", "I", 0.0),
        ("Answer: c", 2, 1.0),
        ("The answer is b\nbecause a is wrong", "B", 1.0),
        ("The answer is a prime number, so\nC", "C", 1.0),
        ("", "A", 0.0),
    ],
)
def test_multiple_choice_reads_the_letter_of_the_answer(answer: str, truth: Any, score: float) -> None:
    assert multiple_choice.compute_score(answer, truth)["score"] == score


def test_exact_match_ignores_case_articles_and_punctuation_and_takes_any_truth() -> None:
    assert exact.compute_score("<answer>The Beatles!</answer>", ["beatles", "fab four"])["score"] == 1.0
    assert exact.compute_score("the beatles", "rolling stones")["score"] == 0.0
    assert exact.compute_score("The beatles", "the beatles", normalize=False)["score"] == 0.0


def test_format_wants_one_thought_and_one_answer() -> None:
    assert exact.compute_format_score("<think>hm</think>\n<answer>4</answer>") == 1.0
    assert exact.compute_format_score("<answer>4</answer>") == 0.0
    assert exact.compute_format_score("<think>a</think><answer>4</answer><answer>5</answer>") == 0.0


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("<answer>(6 - 2) * 3 * 2</answer>", 0.1),
        ("<answer>6 * 3 + 2 * 3</answer>", 0.1),
        ("<answer>(2 + 6) * 3</answer>", 1.0),
        ("so (2 + 6) * 3 = 24", 1.0),
        ("(2 + 6) \u00d7 3 = 24", 1.0),
        ("<answer>2 ** 6 + 3</answer>", 0.0),
        ("<answer>6 / (3 - 3)</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("nothing", 0.0),
    ],
)
def test_countdown_wants_each_number_once_and_the_target(answer: str, score: float) -> None:
    truth = {"target": 24, "numbers": [2, 3, 6]}
    assert countdown.compute_score(answer, truth, format_score=0.1)["score"] == score
    assert countdown.compute_score(answer, json.dumps(truth), format_score=0.1)["score"] == score


def test_arithmetic_takes_the_last_number() -> None:
    assert arithmetic.compute_score("12 + 30 = 42.", "42") == {"score": 1.0, "acc": 1.0, "pred": "42"}
    assert arithmetic.compute_score("42 or 43", "42", format_score=0.1)["score"] == 0.1
    assert arithmetic.compute_score("forty-two", "42", format_score=0.1)["score"] == 0.0


def test_endless_digits_are_a_wrong_answer_and_read_at_once() -> None:
    digits = "1" * 50_000  # what a model writes that repeats itself
    assert arithmetic.compute_score(digits, "12")["score"] == 0.0
    assert arithmetic.compute_list_score(digits, "1, 2")["score"] == 0.0


def test_lists_are_compared_entry_by_entry() -> None:
    assert arithmetic.compute_list_score("Sorted: 1, 2, 3", "1, 2, 3")["score"] == 1.0
    assert arithmetic.compute_list_score("1, 3, 2", "1, 2, 3", partial=0.6)["score"] == pytest.approx(0.2)
    assert arithmetic.compute_list_score("", "1, 2")["score"] == 0.0


def test_code_is_scored_by_the_share_of_tests_it_passes() -> None:
    answer = "```python\nn = int(input())\nprint(n * n if n != 3 else 0)\n```"
    result = code.compute_score(answer, {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]}, sandbox=LocalSandbox())
    assert (result["score"], result["acc"], result["passed"]) == (0.5, 0.0, 1)


def test_code_can_call_a_function_or_a_method() -> None:
    tests = {"fn_name": "add", "inputs": [[1, 2], "3\n4"], "outputs": [3, "7"]}
    assert code.compute_score("```\ndef add(a, b):\n    return a + b\n```", tests)["score"] == 1.0
    method = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
    assert code.compute_score(method, tests)["score"] == 1.0


def test_a_program_that_hangs_or_eats_memory_is_wrong_not_a_failure() -> None:
    sandbox = LocalSandbox()
    hung = sandbox.run("while True: pass", stdin="", timeout=0.5, memory_limit_mb=512)
    assert (hung.ok, hung.timed_out) == (False, True)
    greedy = sandbox.run("x = bytearray(1 << 30)", stdin="", timeout=10, memory_limit_mb=256)
    assert not greedy.ok
    assert "MemoryError" in greedy.stderr


def test_an_unreachable_sandbox_raises_instead_of_scoring() -> None:
    sandbox = RemoteSandbox("http://127.0.0.1:9/run_code", attempts=1)
    with pytest.raises(SandboxUnavailable, match=r"127\.0\.0\.1:9"):
        code.compute_score("```\nprint(1)\n```", {"inputs": [""], "outputs": ["1"]}, sandbox=sandbox)


class FakeService(BaseHTTPRequestHandler):
    """Answers like SandboxFusion: code that says "broken" meets a broken service, all else prints its input."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = {
            "status": "Success",
            "run_result": {"status": "Finished", "return_code": 0, "stdout": request["stdin"]},
        }
        if "slow" in request["code"]:
            reply = {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "", "stderr": ""}}
        if "broken" in request["code"]:
            reply = {"status": "SandboxError", "message": "no workers"}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_remote_sandbox_tells_wrong_programs_from_its_own_trouble() -> None:
    server = HTTPServer(("127.0.0.1", 0), FakeService)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sandbox = RemoteSandbox(f"http://127.0.0.1:{server.server_port}/run_code", attempts=1)
    tests = {"inputs": ["7"], "outputs": ["7"]}
    try:
        assert code.compute_score("```\nprint(input())\n```", tests, sandbox=sandbox)["score"] == 1.0
        assert code.compute_score("```\nslow\n```", tests, sandbox=sandbox)["score"] == 0.0
        with pytest.raises(SandboxUnavailable, match="no workers"):
            code.compute_score("```\nbroken\n```", tests, sandbox=sandbox)
    finally:
        server.shutdown()
        server.server_close()


class CountingService(FakeService):
    """Notes how many programs it was asked to run at the same time; holds each until there have been as many as asked,
    and for a moment in which one too many could come."""

    running, most, wanted = 0, 0, 0
    changed = threading.Condition()

    def do_POST(self) -> None:
        kind = type(self)
        with kind.changed:
            kind.running += 1
            kind.most = max(kind.most, kind.running)
            kind.changed.notify_all()
            assert kind.changed.wait_for(lambda: kind.most >= kind.wanted, 20)
            kind.changed.wait_for(lambda: kind.running > kind.wanted, 0.05)
            kind.running -= 1
        super().do_POST()


@pytest.mark.parametrize(("max_concurrent", "num_workers", "most"), [(6, 2, 6), (1, 4, 1)])
def test_the_remote_sandbox_never_gets_more_programs_at_a_time_than_it_takes(
    monkeypatch: pytest.MonkeyPatch, max_concurrent: int, num_workers: int, most: int
) -> None:
    monkeypatch.setattr(CountingService, "most", 0)
    monkeypatch.setattr(CountingService, "wanted", most)
    server = ThreadingHTTPServer(("127.0.0.1", 0), CountingService)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/run_code"
    section = {
        "num_workers": num_workers,
        "sandbox_fusion": {"url": url, "max_concurrent": max_concurrent},
    }
    config = DovetailConfig(reward_model=section)
    tests = {"inputs": [str(i) for i in range(6)], "outputs": [str(i) for i in range(6)]}
    call = {
        "data_source": "apps", "solution_str": "```\nprint(input())\n```", "ground_truth": tests, "extra_info": {}
    }  # fmt: skip
    pool = KillablePool(reward_specs(config), num_workers=scoring_processes(config), timeout_seconds=30)
    try:
        results = [future.result() for future in [pool.submit(call) for _ in range(4)]]
        assert [result["score"] for result in results] == [1.0] * 4
        assert CountingService.most == max_concurrent
    finally:
        pool.close()
        server.shutdown()
        server.server_close()


def test_every_rule_can_be_imported() -> None:
    assert all(callable(find_rule(name)) for name in RULES)


def test_data_sources_are_routed_and_unknown_ones_are_an_error_that_names_the_way_out() -> None:
    assert default_compute_score("openai/gsm8k", "#### 3", "3")["score"] == 1.0
    assert default_compute_score("aime_2024", "Answer: 5", "4")["score"] == -1.0
    with pytest.raises(ValueError, match=r"'openai/gsm8K'.*Did you mean openai/gsm8k.*custom_reward_function\.path"):
        default_compute_score("openai/gsm8K", "#### 3", "3")
