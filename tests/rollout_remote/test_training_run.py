"""A whole training run whose answers are written by a vLLM server, started as docs/rollout.md says.

Every update reaches it, through a group (the default) or a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.main import main
from dovetail.observability.run_folder import RunFolder
from tests.docs.commands import page_command
from tests.rollout_remote.servers import VLLMServer
from tests.trainer.toy_run import Toy, save_toy_data

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.xdist_group("vllm-servers")]


@pytest.mark.parametrize("path", ["disk", "broadcast"])
def test_servers_and_trainer_agree_at_every_step_of_a_run(
    servers: list[VLLMServer], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    toy = Toy(folder, save_toy_data(tmp_path / "data", count=8))
    changes: dict[str, Any] = {
        **page_command("rollout.md", "rollout.name=vllm").keys,
        "actor_rollout_ref.rollout.server_urls": [server.url for server in servers],
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "trainer.total_training_steps": 2,
    }
    if path == "disk":
        changes |= {"actor_rollout_ref.rollout.weight_sync": "disk"}
        changes |= {"actor_rollout_ref.rollout.weights_folder": str(tmp_path / "weights")}
    run = tmp_path / "run"
    monkeypatch.setenv("DOVETAIL_LOGGING_LEVEL", "WARNING")
    assert main(["train", "--local", *toy.arguments(run, changes)]) == 0
    metrics = RunFolder(run).read_metrics()
    assert len(metrics) == 2
    # A stale server would be off by tenths after an update at this rate; float32 kernels differ by rounding.
    assert [row["rollout_corr/probs_diff_max"] < 1e-4 for row in metrics] == [True] * 2
    assert [abs(row["rollout_corr/kl"]) < 1e-5 for row in metrics] == [True] * 2
    assert all(row["actor/grad_norm"] > 0 for row in metrics)
