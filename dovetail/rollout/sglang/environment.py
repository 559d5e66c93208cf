"""What must hold before SGLang starts: known versions, a Python that has it, environment variables. Imports none."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping

from dovetail.rollout.base import EngineError

OLDEST, NEWEST = (0, 5, 18), (0, 5, 23)
"""Supported SGLang, both ends included. The tests run 0.5.18; the calls made here are the same up to 0.5.23."""

PYTHON_VARIABLE = "DOVETAIL_SGLANG_PYTHON"
"""The Python that starts local servers, where `rollout.sglang_python` does not say."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

# Each is set only when it is unset: whoever sets one by hand knows better.
_ON_CPU: Mapping[str, str] = {
    # Without it SGLang looks for an accelerator, and its CPU code paths stay off.
    "SGLANG_USE_CPU_ENGINE": "1",
    # Threads that spin while they wait take the cores from the trainer: 0.4 instead of 12 tokens a second was seen.
    "OMP_WAIT_POLICY": "PASSIVE",
    # gloo would listen on the address of the outer network interface.
    GLOO_INTERFACE: "lo",
}


def environment(*, cpu: bool, raw_logprobs: bool = False) -> dict[str, str]:
    """The variables that processes of SGLang need."""
    # SGLang gets a few tokens more than the model's context, which it keeps free; nothing is ever written there.
    wanted = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", **(_ON_CPU if cpu else {})}
    return wanted | ({"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"} if raw_logprobs else {})


def supported_range() -> str:
    oldest, newest = (".".join(map(str, limit)) for limit in (OLDEST, NEWEST))
    return f"rollout.name=sglang supports {oldest} to {newest}."


def how_to_install() -> str:
    return (
        "pip install 'dovetail[sglang]' (CUDA), or `make sglang-env` (CPU, an environment of its own) and "
        f"rollout.sglang_python or {PYTHON_VARIABLE} naming its Python. "
        "rollout.name=native needs nothing more than dovetail."
    )


def server_python(configured: str | None) -> str:
    """The Python that local servers run under: as configured, else of the environment variable, else this one."""
    python = configured or os.environ.get(PYTHON_VARIABLE)
    if python is not None:
        path = os.path.abspath(os.path.expanduser(python))
        if not os.access(path, os.X_OK) or os.path.isdir(path):
            raise EngineError(
                f"rollout.sglang_python={python} (or {PYTHON_VARIABLE}) is no program that can be run; name the Python "
                "of the environment that has SGLang, such as .venv-sglang/bin/python."
            )
        return path
    if importlib.util.find_spec("sglang") is None:
        raise EngineError(f"SGLang is not installed for {sys.executable}: {how_to_install()}")
    return sys.executable
