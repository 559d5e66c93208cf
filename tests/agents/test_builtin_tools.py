"""Calculator, Python and search."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.agents import InfrastructureError, Task
from dovetail.agents.tools.calculator import calculator
from dovetail.agents.tools.python import PythonToolbox
from dovetail.agents.tools.schema import ToolError
from dovetail.agents.tools.search import SearchIndex, SearchToolbox
from dovetail.agents.types import Toolbox, ToolCall
from dovetail.rewards import sandbox
from dovetail.rewards.sandbox import detect_isolation

pytestmark = pytest.mark.unit


def call(toolbox: Toolbox, name: str, **arguments: Any) -> str:
    async def run() -> str:
        tools, _ = await toolbox.open(Task([]))
        return (await tools.call(ToolCall(name, arguments))).text

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("0.1 + 0.2", "0.3"),
        ("(1,200 - $200) / 8 =", "125"),
        ("10 / 4", "2.5"),
        ("1 / 3", "0.333333333333"),
        ("-7 // 2", "-4"),
        ("7 % 3", "1"),
        ("2 ^ 10", "1024"),
        ("2 ** -1", "0.5"),
        ("sqrt(16) + abs(-2)", "6"),
        ("3 \u00d7 4 \u00f7 2 \u2212 1", "5"),
        ("round(2.6)", "3"),
        ("sin(0) + pi * 0", "0"),
        ("2 ** 0.5", "1.41421356237"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("1 / 0", "Error: "),
        ("9 ** 9 ** 9", "too large"),
        ("((10 ** 1000) ** 4) ** 1", "too large"),
        ("__import__('os').getcwd()", "is no arithmetic"),
        ("(lambda: 1)()", "is no arithmetic"),
        ("'a' * 9", "is no arithmetic"),
        ("True + 1", "is no arithmetic"),
        ("2 +", "is no arithmetic expression"),
        ("1+" * 600 + "1", "more than 1000 characters"),
        ("sqrt(-1)", "not real"),
        ("1e999", "Error: "),
        ("round(1e999)", "Error: "),
        ("exp(10 ** 6)", "Error: "),
        ("", "is no arithmetic expression"),
    ],
)
def test_the_calculator_says_what_it_does_not_do(expression: str, says: str) -> None:
    text = calculator(expression)
    assert text.startswith("Error: ")
    assert says in text


@given(st.text(alphabet="0123456789+-*/%().e^ abspi", max_size=30))
def test_the_calculator_never_raises(expression: str) -> None:
    assert isinstance(calculator(expression), str)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("x = 6\nx * 7", "42"),
        ("'é'; 'né'", "'né'"),
        ("```python\nprint('fenced')\n```", "fenced"),
        ("None", ""),
        ("for i in range(3):\n    print(i, end='')", "012"),
        (r"'a\ b'", r"'a\\ b'"),  # Python warns of such escapes, but nobody who reads the run's console wrote this one
    ],
)
def test_python_shows_what_is_printed_and_the_last_value(code: str, text: str, recwarn: Any) -> None:
    assert call(PythonToolbox(), "python", code=code) == text
    assert not [str(warning.message) for warning in recwarn if "escape" in str(warning.message)]


def test_python_keeps_nothing_between_calls_and_a_mistake_is_an_observation() -> None:
    toolbox = PythonToolbox(max_output=200)
    assert call(toolbox, "python", code="x = 1; open('kept', 'w').write('x')") == "1"
    assert "NameError: name 'x' is not defined" in call(toolbox, "python", code="print(x)")
    assert call(toolbox, "python", code="import os; os.path.exists('kept')") == "False"
    assert "SyntaxError" in call(toolbox, "python", code="print(")
    long = call(toolbox, "python", code="print('a' * 5000)")
    assert len(long) < 300
    assert "(truncated)" in long


def test_python_ends_what_takes_too_long_or_too_much_memory() -> None:
    # The limit holds the start of an interpreter, on a busy machine too.
    code = "import threading; print('begun', flush=True); threading.Event().wait()"
    text = call(PythonToolbox(timeout_s=3), "python", code=code)
    assert text == "begun\nError: the program was ended after 3 s."
    assert "MemoryError" in call(PythonToolbox(memory_limit_mb=256), "python", code="x = bytearray(1 << 30)")
    killed = call(PythonToolbox(), "python", code="import os; os.kill(os.getpid(), 9)")
    # In a namespace of its own the program is the first process, which no signal of its own can end.
    assert killed == ("" if detect_isolation().is_sandbox else "Error: the program was killed, perhaps for its memory.")


def test_python_reaches_what_the_sandbox_says(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden")
    seen = call(PythonToolbox(), "python", code=f"import os; os.path.exists({str(secret)!r})")
    assert seen == str(not detect_isolation().is_sandbox)
    network = (
        "import socket\ntry:\n    socket.create_connection(('127.0.0.1', 1), 1)\nexcept OSError as e:\n    print(e)"
    )
    if detect_isolation().is_sandbox:
        assert "unreachable" in call(PythonToolbox(), "python", code=network).lower()


def test_a_sandbox_that_cannot_start_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    toolbox = PythonToolbox()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr("dovetail.rewards.sandbox._launchers.launch", refuse)
    with pytest.raises(InfrastructureError, match="Resource temporarily unavailable"):
        call(toolbox, "python", code="1")


def test_a_service_that_is_not_there_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(InfrastructureError, match="cannot be used after 3 attempts"):
        call(PythonToolbox(url="http://127.0.0.1:1/run_code"), "python", code="1")


def test_programs_run_at_most_so_many_at_a_time() -> None:
    running, most = 0, 0

    class Counted:
        def run(self, code: str, **limits: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            running -= 1
            raise ValueError("counted")

    async def run() -> None:
        toolbox = PythonToolbox(max_concurrent=1)
        toolbox._sandbox = Counted()
        tools, _ = await toolbox.open(Task([]))
        await asyncio.gather(*[tools.call(ToolCall("python", {"code": "1"})) for _ in range(20)])

    asyncio.run(run())
    assert most == 1


def write_corpus(folder: Path) -> str:
    passages = [
        {"title": "Oslo", "text": "Oslo is the capital of Norway."},
        {"contents": "Rome is the capital of Italy; Rome was not built in a day."},
        {"text": "Bread is made of flour."},
    ]
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(passage) for passage in passages) + "\n\n")
    return str(path)


def test_search_finds_the_passage_with_the_rare_words_first(tmp_path: Path) -> None:
    toolbox = SearchToolbox(write_corpus(tmp_path), top_k=2)
    text = call(toolbox, "search", query="What is the capital of Italy?")
    assert text.splitlines() == [
        "[1] Rome is the capital of Italy; Rome was not built in a day.",
        "[2] Oslo: Oslo is the capital of Norway.",
    ]
    assert call(toolbox, "search", query="zebra") == "Nothing was found."


def test_bm25_by_hand() -> None:
    index = SearchIndex(["a b", "a a c c"])
    assert index.search("a", 2) == [1, 0]  # 2 / (2 + 1.5 * 1.25) > 1 / (1 + 1.5 * 0.75)
    assert index.search("b", 2) == [0]
    assert SearchIndex([]).search("a", 2) == []


def test_a_corpus_that_cannot_be_read_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="is not there"):
        SearchToolbox(str(tmp_path / "none.jsonl"))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(ToolError, match=r"line 2 has no text; name it text or contents"):
        SearchToolbox(str(bad))


def test_a_launcher_that_is_killed_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the kernel when the machine has no memory left: that says nothing about the program."""
    toolbox = PythonToolbox()
    launch = sandbox._launchers.launch

    def killed(*args: Any) -> int:
        launcher = launch(*args)
        os.kill(launcher, signal.SIGKILL)
        return launcher

    monkeypatch.setattr(sandbox._launchers, "launch", killed)
    with pytest.raises(InfrastructureError, match="could not be started"):
        call(toolbox, "python", code="import time; time.sleep(60)")


def test_a_program_that_fails_sees_its_own_frames_only() -> None:
    assert call(PythonToolbox(), "python", code="def f():\n    return 1 / 0\nf()") == (
        'Traceback (most recent call last):\n  File "program.py", line 3, in <module>\n'
        '  File "program.py", line 2, in f\nZeroDivisionError: division by zero'
    )
    syntax = call(PythonToolbox(), "python", code="def f(:")
    assert syntax.startswith('File "program.py", line 1')
    assert "program_launcher" not in syntax


def test_programs_start_again_after_the_process_that_starts_them_was_killed() -> None:
    toolbox = PythonToolbox()
    assert call(toolbox, "python", code="1 + 1") == "2"
    assert sandbox._launchers._process is not None
    sandbox._launchers._process.kill()
    sandbox._launchers._process.wait()
    assert call(toolbox, "python", code="1 + 2") == "3"
