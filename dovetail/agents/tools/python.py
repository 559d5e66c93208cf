"""`python`: a program of the model's, run in the sandbox that scores programs. Each call begins anew.

What a program can reach is what `dovetail.rewards.sandbox` isolates on this machine: with namespaces (Linux) neither
your files nor a network; otherwise only time, memory and output are limited, which is logged once.
"""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import re
import warnings

from dovetail.agents.deadlines import place_in
from dovetail.agents.tools.functions import FunctionToolbox
from dovetail.agents.tools.observations import truncate_text
from dovetail.agents.tools.schema import read_signature
from dovetail.agents.tools.threads import call_function
from dovetail.agents.types import InfrastructureError
from dovetail.rewards.sandbox import LocalSandbox, RemoteSandbox, Sandbox, SandboxUnavailable, detect_isolation

logger = logging.getLogger(__name__)

_FENCE = re.compile(r"^\s*```(?:python|py)?\s*\n(.*?)\n?\s*```\s*$", re.DOTALL)
_MAX_PARSED = 100_000


class PythonToolbox(FunctionToolbox):
    """One tool, `python(code)`: what the program prints, and the value of its last line as in a notebook."""

    def __init__(
        self,
        *,
        name: str = "python",
        timeout_s: float = 10.0,
        memory_limit_mb: int = 1024,
        max_output: int = 10_000,
        max_concurrent: int | None = None,
        isolation_required: bool = False,
        url: str | None = None,
    ) -> None:
        """`max_concurrent`: programs at a time, twice the cores unless said: those that wait lose no time of theirs.

        `url`: of a SandboxFusion service, in the place of this machine.
        """
        self._timeout_s, self._memory_limit_mb, self._max_output = timeout_s, memory_limit_mb, max_output
        self._sandbox: Sandbox = RemoteSandbox(url) if url else LocalSandbox(required=isolation_required)
        if url is None:
            isolation = detect_isolation()
            level = logging.INFO if isolation.is_sandbox else logging.WARNING
            logger.log(level, "tool %s: %s", name, isolation.describe())
        self._places = asyncio.Semaphore(max_concurrent or 2 * (os.cpu_count() or 1))
        self._functions = {name: (read_signature(self.run, name=name), self.run)}

    async def run(self, code: str) -> str:
        """Run a Python program and see what it prints. Each program begins anew and keeps nothing.

        Args:
            code: The program. The value of its last line is shown, too.
        """
        match = _FENCE.match(code)
        program = _show_last_value(match[1] if match else code)
        async with place_in(self._places):
            try:
                done = await call_function(
                    self._sandbox.run, program, stdin="", timeout=self._timeout_s, memory_limit_mb=self._memory_limit_mb
                )
            except SandboxUnavailable as error:
                raise InfrastructureError(str(error)) from error
        text = truncate_text(done.stdout.strip(), self._max_output, "middle")
        if done.timed_out:
            return f"{text}\nError: the program was ended after {self._timeout_s:g} s.".strip()
        if not done.ok:
            reason = truncate_text(done.stderr.strip(), self._max_output, "left")
            text = f"{text}\n{reason or 'Error: the program was killed, perhaps for its memory.'}".strip()
        return text


def _show_last_value(code: str) -> str:
    """The program, with a line that prints its last expression. Only parsed here, never run."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of the program's odd escapes, which would be on your console
            last = ast.parse(code[:_MAX_PARSED]).body[-1]
    except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError):
        return code
    if not isinstance(last, ast.Expr) or len(code) > _MAX_PARSED:
        return code
    lines = code.encode().splitlines()
    before = b"\n".join([*lines[: last.lineno - 1], lines[last.lineno - 1][: last.col_offset]])
    return f"{before.decode()}__value = ({ast.unparse(last.value)})\nif __value is not None: print(repr(__value))"
