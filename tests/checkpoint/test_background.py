"""A save writes the state of the moment it was started, whatever training does meanwhile, and warns of nothing."""

from __future__ import annotations

import gc
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dovetail.checkpoint import sharded as background_module
from dovetail.checkpoint.sharded import BackgroundSave, load_sharded, save_sharded, take_snapshot, without_collectives
from dovetail.observability.waits import WaitTimeout
from tests.ranks import run_ranks

pytestmark = pytest.mark.unit


def network(seed: int = 0) -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    torch.manual_seed(seed)
    module = torch.nn.Linear(8, 4)
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        module(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_steps_taken_after_the_start_are_not_in_it(tmp_path: Path) -> None:
    module, optimizer = network()
    train(module, optimizer)
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    moment = optimizer.state[module.weight]["exp_avg"].clone()
    extra = {"schedule": {"step": 1}}
    snapshot = take_snapshot(module, optimizer, extra=extra, copied=True)
    train(module, optimizer, 3)
    extra["schedule"]["step"] = 4
    save = BackgroundSave()
    save.start(tmp_path, snapshot)
    save.finish()
    other, other_optimizer = network(1)
    assert load_sharded(tmp_path, other, other_optimizer) == {"schedule": {"step": 1}}
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, expected[name])
    assert torch.equal(other_optimizer.state[other.weight]["exp_avg"], moment)
    assert float(other_optimizer.state[other.weight]["step"]) == 1


def test_what_goes_wrong_is_raised_when_it_is_asked_for_and_only_once(tmp_path: Path) -> None:
    module, optimizer = network()
    (tmp_path / "file").write_text("")
    save = BackgroundSave()
    save.start(tmp_path / "file", take_snapshot(module, optimizer, extra={}, copied=True))
    with pytest.raises(OSError, match="file"):
        save.finish()
    save.finish()
    assert not save.is_running


def test_a_save_that_never_ends_is_given_up_at_its_limit_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = threading.Event()
    monkeypatch.setattr(background_module, "write_snapshot", lambda *args: disk.wait(60))
    monkeypatch.setattr(background_module, "BACKGROUND_LIMIT_S", 0.2)
    save = BackgroundSave()
    save.start(tmp_path / "stuck", take_snapshot(*network(), extra={}, copied=True))
    with pytest.raises(WaitTimeout, match=r"rank 0 waits for its save in the background of \S+/stuck since"):
        save.finish()
    disk.set()
    save.finish()
    assert not save.is_running


def save_while_training(rank: int, world_size: int, folder: Path) -> None:
    """Every rank trains, with collectives of its own, while its part is written."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module, _ = network()
    fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    train(module, optimizer)
    save = BackgroundSave()
    for number in range(3):
        before = module.weight.full_tensor().clone()
        save.start(folder / str(number), take_snapshot(module, optimizer, extra={"number": number}, copied=True))
        train(module, optimizer, 5)
        for _ in range(20):
            dist.all_reduce(torch.ones(1000))
        save.finish()
        after = module.weight.full_tensor().clone()
        assert not torch.equal(before, after)
        assert load_sharded(folder / str(number), module, optimizer) == {"number": number}
        assert torch.equal(module.weight.full_tensor(), before)


@pytest.mark.distributed
def test_two_ranks_train_on_while_their_parts_are_written(tmp_path: Path) -> None:
    run_ranks(save_while_training, 2, tmp_path)


def test_one_process_saves_and_loads_without_a_warning(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    kept = model.weight.detach().clone()
    gc.collect()  # a file that an earlier test left open warns when it is collected, and not inside
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_sharded(tmp_path / "a", model, None, extra={})
        background = BackgroundSave()
        background.start(tmp_path / "b", take_snapshot(model, None, extra={}, copied=True))
        background.finish()
        nn.init.zeros_(model.weight)
        load_sharded(tmp_path / "b", model, None)
    assert [str(entry.message) for entry in caught] == []
    assert torch.equal(model.weight, kept)


def test_other_warnings_of_the_process_are_left_alone() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = len(warnings.filters)
        assert without_collectives(1)
        assert without_collectives(1)
        assert not without_collectives(2)
        assert len(warnings.filters) == before + 1
        warnings.warn("torch.distributed is slow", UserWarning, stacklevel=1)
    assert len(caught) == 1


def test_torch_still_warns_of_what_it_was_told(tmp_path: Path) -> None:
    """When this fails, `checkpoint/sharded.py` has nothing left to do."""
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        dcp.save({"x": torch.ones(1)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
