"""What a profiled step leaves on disk."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from dovetail.config import ConfigError, load_config
from dovetail.trainer.devices import uses_gpu
from dovetail.workers.step_trace import start_step_profile


@pytest.mark.unit
def test_the_history_of_allocations_is_recorded_until_its_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **settings: calls.append(settings))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    profile = start_step_profile("torch_memory", tmp_path / "profile" / "step_3_rank_1", torch.device("cuda"))
    path = profile.finish()
    assert path == str(tmp_path / "profile" / "step_3_rank_1.memory.pickle")
    assert calls == [{"max_entries": 1_000_000}, path, {"enabled": None}]


@pytest.mark.unit
def test_a_machine_without_gpus_refuses_to_record_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    steps = "global_profiler.steps=[2]"
    config = load_config(overrides=["global_profiler.tool=torch_memory", steps]).config
    with pytest.raises(ConfigError, match="torch_memory records the memory of GPUs, and the run computes on the CPU"):
        uses_gpu(config)
    assert uses_gpu(load_config(overrides=[steps]).config) is False


@pytest.mark.gpu
def test_the_history_names_the_function_that_took_the_memory(tmp_path: Path) -> None:
    profile = start_step_profile("torch_memory", tmp_path / "step_1_rank_0", torch.device("cuda"))

    def takes_three_mebibytes() -> torch.Tensor:
        return torch.empty(3 << 20, dtype=torch.uint8, device="cuda")

    kept = takes_three_mebibytes()
    history = pickle.loads(Path(profile.finish()).read_bytes())
    assert kept.numel() == 3 << 20
    events = [event for device in history["device_traces"] for event in device if event["size"] >= 3 << 20]
    assert any(frame["name"] == takes_three_mebibytes.__name__ for event in events for frame in event["frames"])
