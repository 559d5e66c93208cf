"""Which runs may use servers by URL, and which engine the section `rollout` then gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.config.effects import unsupported_in_runs
from dovetail.config.rollout import RolloutConfig
from dovetail.config.root import DovetailConfig
from dovetail.rollout.registry import engine_class_for
from dovetail.rollout.remote.engine import RemoteRollout

pytestmark = pytest.mark.unit

URLS = ["http://10.0.0.5:8000"]


def _refusals(**rollout: Any) -> list[str]:
    config = DovetailConfig(actor_rollout_ref={"model": {"path": "m"}, "rollout": rollout})
    keys = ("rollout.name", "rollout.mode", "rollout.weight_sync")
    return [str(problem.message) for problem in unsupported_in_runs(config) if problem.key.endswith(keys)]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("way", [{}, {"weight_sync": "disk", "weights_folder": "/shared/w"}])
def test_vllm_and_sglang_servers_may_follow_a_run(name: str, way: dict[str, str]) -> None:
    assert _refusals(name=name, mode="server", server_urls=URLS, **way) == []


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"name": "native", "mode": "server", "server_urls": URLS}, "say what the servers are"),
        ({"name": "vllm", "mode": "server"}, "give rollout.server_urls"),
        ({"name": "vllm", "mode": "server", "server_urls": URLS, "weight_sync": "disk"}, "rollout.weights_folder"),
        ({"name": "vllm", "mode": "server", "server_urls": URLS, "weight_sync": "colocated"}, "memory of their own"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(rollout: dict[str, Any], words: str) -> None:
    (message,) = _refusals(**rollout)
    assert words in message


def test_urls_choose_the_remote_engine_and_need_no_engine_library() -> None:
    for name in ("vllm", "sglang"):
        assert engine_class_for(RolloutConfig(name=name, mode="server", server_urls=URLS)) is RemoteRollout
    assert engine_class_for(RolloutConfig(server_urls=URLS)).name == "native"


def test_the_key_of_the_servers_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(RemoteRollout, "__init__", lambda self, *args, **options: asked.append(options["api_key"]))
    keyless, config = (
        RolloutConfig(name="vllm", mode="server", server_urls=URLS, server_api_key_env=variable)
        for variable in (None, "DOVETAIL_TEST_KEY")
    )
    RemoteRollout.from_config(keyless, "m", device=torch.device("cpu"))
    with pytest.raises(ValueError, match="DOVETAIL_TEST_KEY names an environment variable that is not set"):
        RemoteRollout.from_config(config, "m", device=torch.device("cpu"))
    monkeypatch.setenv("DOVETAIL_TEST_KEY", "open sesame")
    RemoteRollout.from_config(config, "m", device=torch.device("cpu"))
    assert asked == [None, "open sesame"]
