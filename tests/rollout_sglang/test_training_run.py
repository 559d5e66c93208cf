"""Whole training runs with a real SGLang server, asked for as docs/rollout.md says: every update reaches it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="training, which needs dovetail's own environment")

from dovetail.observability.run_folder import RunFolder
from dovetail.rollout.sglang.environment import PYTHON_VARIABLE
from tests.docs.commands import page_command
from tests.models.tiny import save_tiny_model
from tests.rollout_sglang.conftest import needs_sglang
from tests.trainer.toy_run import Toy, save_toy_data, train_apart

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), needs_sglang]

R = "actor_rollout_ref.rollout"
SERVER = {
    f"{R}.engine_kwargs": {"sglang": {"max_total_tokens": 4096}},
    f"{R}.max_num_seqs": 16,
    "actor_rollout_ref.actor.optim.lr": 1e-2,
}
SEPARATE = {
    f"{R}.mode": "server",
    "actor_rollout_ref.hybrid_engine": False,
    f"{R}.nnodes": 1,
    f"{R}.n_gpus_per_node": 1,
    f"{R}.load_format": "dummy",
    f"{R}.verify_weights": True,
}


def toy(folder: Path) -> Toy:
    return Toy(save_tiny_model("llama_tied", folder / "model"), save_toy_data(folder / "data", count=12))


@pytest.mark.parametrize("placement", ["shared devices", pytest.param("devices of its own", marks=pytest.mark.slow)])
def test_engine_and_trainer_agree_at_every_step_of_a_run(placement: str, tmp_path: Path) -> None:
    separate = placement == "devices of its own"
    asked = page_command("rollout.md", "rollout.name=sglang").keys
    keys = {**asked, f"{R}.sglang_python": os.environ[PYTHON_VARIABLE], **SERVER, **(SEPARATE if separate else {})}
    run = train_apart(tmp_path, keys, use_ray=separate, make=toy)
    metrics = RunFolder(run).read_metrics()
    assert [row["step"] for row in metrics] == [1, 2, 3]
    # A stale engine would be off by tenths after an update at this rate; float32 kernels differ by rounding.
    assert [row["rollout_corr/probs_diff_max"] < 1e-4 for row in metrics] == [True] * 3
    assert all(row["actor/grad_norm"] > 0 for row in metrics)
