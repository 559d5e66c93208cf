"""Programs: run the last code block (or the bare response) against test cases; the score is the share that passes.

A program that crashes, loops or prints nonsense is a wrong answer. A sandbox that cannot be reached is not: it raises.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dovetail.rewards.sandbox import LocalSandbox, RemoteSandbox, Sandbox

# Later ones win where two define a name; Python's own names win over all but typing.
_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
_WORD = re.compile(r"[^\W\d]\w*")


def used_imports(code: str) -> str:
    """Lines to put before the program: contest programs take `gcd`, `List` and `deque` for granted.

    Only modules whose names occur are imported: all of them would cost more than most programs. Empty for a
    program with `from __future__`, which must come first.
    """
    if "__future__" in code:
        return ""
    words = set(_WORD.findall(code))
    named = [name for name in _MODULES if name in words or name == "sys"]
    starred = [name for name, exports in _exports().items() if exports & words]
    lines = [f"from {name} import *" for name in _MODULES if name in {*starred, "builtins"}]
    return "\n".join([*lines, *(f"import {name}" for name in named), "sys.setrecursionlimit(600000)", ""])


@functools.cache
def _exports() -> dict[str, frozenset[str]]:
    names_by_module = {}
    for name in _MODULES:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [word for word in vars(module) if not word.startswith("_")]
        names_by_module[name] = frozenset(public)
    builtins = names_by_module.pop("builtins")
    return {name: names if name == "typing" else names - builtins for name, names in names_by_module.items()}


_PYTHON = "```python"
_FIRST_TESTS = 10
_BLOCK = re.compile(r"(?s)```(?:python|py)?[ \t]*\n(.*?)```")


def compute_score(
    solution_str: str,
    ground_truth: Any,
    *,
    sandbox: Sandbox | None = None,
    sandbox_url: str | None = None,
    memory_limit_mb: int = 1024,
    programs_at_once: int = 1,
    code_isolation: str = "auto",
    seconds_per_test: float = 10.0,
    max_tests: int | None = None,
    all_or_nothing: bool = False,
) -> dict[str, Any]:
    """Truth: `{"inputs": [...], "outputs": [...]}`; with `fn_name`, that function is called, else the program run.

    A remote sandbox gets up to `programs_at_once` test cases together; on this machine they take turns. A program that
    fails one of the first ten tests is scored by these ten.
    """
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    inputs, outputs = list(tests["inputs"])[:max_tests], list(tests["outputs"])[:max_tests]
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"the truth has {len(inputs)} inputs and {len(outputs)} outputs; give the same number, not 0.")
    code = extract_code(solution_str)
    if code is None:
        return {"score": 0.0, "acc": 0.0, "passed": 0, "tests": len(inputs)}
    if sandbox is None:
        sandbox = RemoteSandbox(sandbox_url) if sandbox_url else LocalSandbox(required=code_isolation == "required")

    def passes(given: Any, wanted: Any) -> bool:
        program, stdin = _program(code, given, tests.get("fn_name"))
        run = sandbox.run(program, stdin=stdin, timeout=seconds_per_test, memory_limit_mb=memory_limit_mb)
        return run.ok and _same_output(run.stdout, wanted, is_call=bool(tests.get("fn_name")))

    threads = programs_at_once if isinstance(sandbox, RemoteSandbox) else 1
    with ThreadPoolExecutor(max_workers=max(1, min(threads, len(inputs)))) as pool:
        passed = sum(pool.map(passes, inputs[:_FIRST_TESTS], outputs[:_FIRST_TESTS]))
        tried = min(_FIRST_TESTS, len(inputs))
        if passed == tried < len(inputs):
            passed += sum(pool.map(passes, inputs[tried:], outputs[tried:]))
            tried = len(inputs)
    share = passed / tried
    score = float(share == 1.0) if all_or_nothing else share
    return {"score": score, "acc": float(share == 1.0), "passed": passed, "tests": len(inputs)}


def extract_code(solution_str: str) -> str | None:
    """The last python block, closed or not; else the last fenced block; else all of it. None: nothing there."""
    if _PYTHON in solution_str:
        code = solution_str.rpartition(_PYTHON)[2].partition("```")[0]
    else:
        blocks = _BLOCK.findall(solution_str)
        code = blocks[-1] if blocks else solution_str
    return code if code.strip() else None


_CALL = """
import json as _json, sys as _sys
_arguments = _json.loads(_sys.stdin.read())
if _arguments and isinstance(_arguments[0], dict) and all(key.lstrip("-").isdigit() for key in _arguments[0]):
    _arguments = [{{int(key): value for key, value in _arguments[0].items()}}]
_target = Solution().{name} if "Solution" in globals() else {name}
_sys.stdout.write("\\n" + _json.dumps(_target(*_arguments)))
"""


def _program(code: str, given: Any, fn_name: str | None) -> tuple[str, str]:
    code = used_imports(code) + code
    if not fn_name:
        return code, given if isinstance(given, str) else "\n".join(map(str, given))
    # Arguments as a JSON list, or as one JSON value a line.
    arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
    return code + "\n" + _CALL.format(name=fn_name), json.dumps(arguments)


def _same_output(printed: str, wanted: Any, *, is_call: bool) -> bool:
    if is_call:
        try:
            value = json.loads(printed.strip().splitlines()[-1])
        except (ValueError, IndexError):
            return False
        truth = json.loads(wanted) if isinstance(wanted, str) else wanted
        return value in (truth, truth[0]) if isinstance(truth, list) and len(truth) == 1 else value == truth
    text = wanted if isinstance(wanted, str) else "\n".join(map(str, wanted))
    given, truth = _lines(printed), _lines(text)
    return given == truth or _close(given, truth)


def _lines(text: str) -> list[str]:
    """What was printed, without blank lines and blanks at the ends."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _close(given: list[str], truth: list[str]) -> bool:
    """One number a line, each within 0.001 % of the truth; whole numbers must be equal."""
    if len(given) != len(truth) or all(entry.isdigit() for entry in (*given, *truth)):
        return False
    try:
        pairs = [(float(a), float(b)) for a, b in zip(given, truth, strict=True)]
    except ValueError:
        return False
    return all(abs(a - b) <= 1e-8 + 1e-5 * abs(b) for a, b in pairs)
