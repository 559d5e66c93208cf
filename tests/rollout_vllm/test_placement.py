"""Where an actor goes that shares a device with the process that starts it."""

from __future__ import annotations

import pytest
import torch

from dovetail.rollout.vllm.ray_engine import beside_this_process

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("visible", "index", "wanted"),
    [(None, 0, "0"), (None, 2, "2"), ("", 1, "1"), ("3,5", 1, "5"), ("GPU-a", 0, "GPU-a")],
)
def test_it_sees_the_device_of_this_process_and_asks_ray_for_none(
    visible: str | None, index: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    options = beside_this_process(torch.device("cuda", index))
    assert options["env_vars"]["CUDA_VISIBLE_DEVICES"] == wanted
    assert options["num_gpus"] == options["num_cpus"] == 0


def test_on_a_cpu_it_is_given_no_device() -> None:
    assert "env_vars" not in beside_this_process(torch.device("cpu"))
