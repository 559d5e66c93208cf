"""An environment behind OpenEnv's protocol: a session of its own over a WebSocket, or reset and step over HTTP."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

from dovetail.agents.environments import Environment, Step
from dovetail.agents.types import InfrastructureError, Task

_REFUSED = frozenset({"INVALID_JSON", "VALIDATION_ERROR"})
"""Codes of errors that the action caused. The policy reads them; all others are the server's."""


class OpenEnv(Environment):
    """A session at `url`: ws://host:port has a session for each trajectory, http:// one environment for each server.

    The model's text is sent as {`action_key`: text}, and the observation's `observation_key` is shown (the whole
    observation as JSON where it is None). Override `action_of` and `text_of` where that is not enough. What the server
    does not do (no connection, HTTP 500, no JSON, no answer in time) is an `InfrastructureError`.
    """

    def __init__(
        self,
        url: str,
        *,
        action_key: str = "message",
        observation_key: str | None = None,
        timeout_s: float = 60.0,
        **reset_options: Any,
    ) -> None:
        """`reset_options` are sent with every reset, beside the seed."""
        self._url = url.rstrip("/")
        self._action_key, self._observation_key = action_key, observation_key
        self._timeout_s = timeout_s
        self._reset_options = reset_options
        self._session: Any = None
        self._socket: Any = None
        self._episode = uuid.uuid4().hex
        self._num_steps = 0

    def action_of(self, text: str) -> dict[str, Any]:
        """The action as the server takes it."""
        return {self._action_key: text}

    def text_of(self, observation: Any) -> str:
        """The observation as the model sees it."""
        if self._observation_key is not None and isinstance(observation, dict):
            observation = observation.get(self._observation_key, "")
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)

    async def reset(self, task: Task) -> str:
        """The first observation; the seed is the task's."""
        import aiohttp

        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s), trust_env=False)
        options = {"seed": task.seed % 2**31, "episode_id": self._episode, **self._reset_options}
        return self._step(await self._exchange("reset", options)).observation

    async def step(self, action: str) -> Step:
        """What the server made of the action. One that it refuses is an observation."""
        reply = await self._exchange("step", self.action_of(action))
        self._num_steps += 1  # not before: a step that is sent again is the same one
        return self._step(reply)

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    def _step(self, reply: dict[str, Any]) -> Step:
        if "error" in reply:
            return Step(f"Error: {reply['error']}")
        reward = reply.get("reward")
        text = self.text_of(reply.get("observation", ""))
        return Step(text, None if reward is None else float(reward), bool(reply.get("done")))

    async def _exchange(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        import aiohttp

        try:
            async with asyncio.timeout(self._timeout_s):
                by_socket = self._url.startswith(("ws://", "wss://"))
                reply = await (self._over_socket if by_socket else self._over_http)(kind, data)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:  # ValueError: no JSON
            if isinstance(error, TimeoutError):
                self._socket = None  # a late reply would be taken for that to the next action
            what = str(error) or type(error).__name__
            raise InfrastructureError(f"the environment {self._url} did not {kind}: {what}") from error
        if not isinstance(reply, dict):
            raise InfrastructureError(f"the environment {self._url} sent {reply!r:.200} in the place of an observation")
        return reply

    async def _over_http(self, kind: str, data: dict[str, Any]) -> Any:
        # A request that is sent again has the same id: the server can see that it has carried it out.
        identity = {"request_id": f"{self._episode}-{self._num_steps}"}
        body = data if kind == "reset" else {"action": data, **identity}
        async with self._session.post(f"{self._url}/{kind}", json=body) as reply:
            if reply.status in (400, 422) and kind == "step":
                return {"error": f"the action was refused: {(await reply.text())[:500]}"}
            reply.raise_for_status()
            return json.loads(await reply.text())

    async def _over_socket(self, kind: str, data: dict[str, Any]) -> Any:
        import aiohttp

        if kind == "reset":
            self._socket = await self._session.ws_connect(f"{self._url}/ws")
        if self._socket is None or self._socket.closed:  # a new session would be another game
            raise ConnectionError("its session is gone")
        await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError("it ended the session")
        reply: Any = json.loads(message.data)
        if not isinstance(reply, dict):
            return reply
        content: Any = reply.get("data")
        if reply.get("type") == "error" and isinstance(content, dict):
            if kind == "step" and content.get("code") in _REFUSED:
                return {"error": f"the action was refused: {content.get('message')}"}
            raise ConnectionError(f"{content.get('code')}: {content.get('message')}")
        return content
