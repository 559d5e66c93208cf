"""SGLang's `Engine` in this process: its tokenizer manager is here, its scheduler and model in processes it starts.

SGLang takes for granted that the process is its own: it replaces log handlers and the event-loop policy, ends the whole
process when one of its own fails (SIGQUIT), and its shutdown kills every child process, whoever started it. Here it
shares the process with a trainer, so each of these is undone or avoided.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dovetail.rollout.base import EngineError
from dovetail.rollout.sglang.environment import check_version, environment
from dovetail.rollout.sglang.link import RefusedError, Watch
from dovetail.rollout.sglang.settings import SGLangSettings

logger = logging.getLogger(__name__)

# Route of the HTTP server: the request's class in SGLang's io_struct and the tokenizer manager's method.
_METHODS = {
    "/update_weights_from_tensor": ("UpdateWeightsFromTensorReqInput", "update_weights_from_tensor"),
    "/update_weights_from_distributed": ("UpdateWeightsFromDistributedReqInput", "update_weights_from_distributed"),
    "/update_weights_from_disk": ("UpdateWeightFromDiskReqInput", "update_weights_from_disk"),
    "/init_weights_update_group": ("InitWeightsUpdateGroupReqInput", "init_weights_update_group"),
    "/destroy_weights_update_group": ("DestroyWeightsUpdateGroupReqInput", "destroy_weights_update_group"),
    "/release_memory_occupation": ("ReleaseMemoryOccupationReqInput", "release_memory_occupation"),
    "/resume_memory_occupation": ("ResumeMemoryOccupationReqInput", "resume_memory_occupation"),
    "/get_weights_by_name": ("GetWeightsByNameReqInput", "get_weights_by_name"),
}


class InProcessLink:
    """Build it on the main thread; its coroutines belong to an event loop on another one."""

    def __init__(self, settings: SGLangSettings, *, cpu: bool) -> None:
        self.name = "in this process"
        self.death = ""
        self.version = check_version()
        self._watch: Watch | None = None
        self._closed = False
        if threading.current_thread() is not threading.main_thread():
            raise EngineError(
                "SGLang can be started in this process from its main thread only: elsewhere it cannot take the signal "
                "its own processes send when they fail, and that signal ends this process. Use rollout.mode=server."
            )
        with _process_kept(environment(cpu=cpu, raw_logprobs=settings.logprobs == "raw")):
            import sglang

            arguments = settings.sglang_arguments(cpu=cpu)
            self._engine: Any = sglang.Engine(**arguments, custom_sigquit_handler=_child_failed)
        # Both kill every child of this process; SGLang's own die with it as it is.
        atexit.unregister(self._engine.shutdown)
        self._engine.tokenizer_manager._subprocess_watchdog.stop()
        self._pids: list[int] = list(self._engine.get_all_child_pids())

    async def start(self) -> None:
        self._watch = Watch(self._look)

    async def call(self, route: str, body: Mapping[str, Any]) -> Any:
        assert self._watch is not None, "start() comes first"
        return await self._watch.unless_dead(self._call(route, body))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.death = self.death or "it was closed"
        if self._watch is not None:
            self._watch.close()
        import psutil

        for pid in self._pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                child = psutil.Process(pid)
                child.kill()
                child.wait(30)

    async def _call(self, route: str, body: Mapping[str, Any]) -> Any:
        from sglang.srt.managers import io_struct

        manager = self._engine.tokenizer_manager
        try:
            if route == "/generate":
                return await anext(manager.generate_request(io_struct.GenerateReqInput(**body), None))
            if route == "/abort_request":
                return manager.abort_request(rid=body.get("rid", ""), abort_all=body.get("abort_all", False))
            if route == "/update_weight_version":
                return manager.record_config_updates("dovetail", weight_version=body["new_version"])
            if route == "/server_info":
                return {"internal_states": await manager.get_internal_state()}
            if route == "/flush_cache":
                answer = await manager.flush_cache()
                return _accepted(route, answer.success, "requests are pending")
            request, method = _METHODS[route]
            answer = await getattr(manager, method)(getattr(io_struct, request)(**body), None)
        except ValueError as error:
            raise RefusedError(f"SGLang refused {route}: {error}") from error
        if isinstance(answer, tuple):
            return _accepted(route, answer[0], answer[1])
        return answer

    def _look(self) -> str:
        import psutil

        for pid in self._pids:
            try:
                gone = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                gone = True
            if gone and not self.death:
                self.death = f"process {pid} of SGLang died; what it wrote to the log says why."
        return self.death


def _accepted(route: str, success: bool, message: str) -> dict[str, Any]:
    if not success:
        raise RefusedError(f"SGLang refused {route}: {message}")
    return {"success": True, "message": message}


def _child_failed(signum: int, frame: object) -> None:
    """Of the signal SGLang's processes send when they fail. `InProcessLink` notices their end by itself."""
    logger.warning("a process of SGLang failed (signal %d).", signum)


@contextmanager
def _process_kept(variables: Mapping[str, str]) -> Iterator[None]:
    """What SGLang changes while it starts is put back: logging, random numbers, event-loop policy, environment."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    python, array = random.getstate(), np.random.get_state()
    policy = asyncio.get_event_loop_policy()
    before = dict(os.environ)
    os.environ.update(dict(variables) | before)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        random.setstate(python)
        np.random.set_state(array)
        asyncio.set_event_loop_policy(policy)
        for name in os.environ.keys() - before.keys():
            if not name.startswith("SGLANG_"):  # its part in this process goes on reading its own
                del os.environ[name]
        os.environ.update(before)
