"""Settings every test shares: one thread per process, no network, fixed seed."""

import asyncio
import gc
import inspect
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray gives its workers a niceness of 15: beside another busy process they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")
# Ray listens on every interface without this. It is read when ray is imported, which any module may do before another
# starts a Ray in the same process.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a module run in one process, which builds its fixtures once; so do modules that name one group."""
    from tests.groups import ByGroup

    return ByGroup(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """After pytest-randomly: a test that kills shared servers comes last in its group. Else they are started again."""
    if not any(item.get_closest_marker("kills") for item in items):
        return
    places: dict[Any, int] = {}

    def place(item: pytest.Item) -> tuple[int, bool]:
        group = item.get_closest_marker("xdist_group")
        number = places.setdefault(group.args if group else item.path, len(places))
        return number, item.get_closest_marker("kills") is not None

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Torch, Ray and 5,000 tests are 760,000 objects that stay: the garbage collector never looks at them.

    It would for 8 s while they are made, and for 0.4 s in every training run of a test, which freezes its heap.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind, in Triton, reports what Python does not collect at its end


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine has an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network."""
    from dovetail.config.hub import fetch_model

    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    fetch_model.cache_clear()
    return folder


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """For tests that look at the garbage collector: this process has no frozen objects."""
    gc.unfreeze()
    yield
    gc.freeze()


def _fix_numbers() -> None:
    """The same seed for every test, and the settings that decide how sums are made."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    # On a CPU without bfloat16 instructions, torch turns oneDNN off for good at the first product in bfloat16.
    torch.backends.mkldnn.enabled = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before fixtures of modules, which would compute as the test before them has left it."""
    _fix_numbers()


@pytest.fixture(autouse=True)
def _fixed_numbers() -> None:
    """Again after them: they draw random numbers."""
    _fix_numbers()


@pytest.fixture(autouse=True)
def _level_of_worker_logs_as_it_was() -> Iterator[None]:
    """A command called in a test sets it for the workers it starts; those of later tests would be silent."""
    before = os.environ.get("DOVETAIL_LOGGING_LEVEL")
    yield
    os.environ.pop("DOVETAIL_LOGGING_LEVEL", None)
    if before is not None:
        os.environ["DOVETAIL_LOGGING_LEVEL"] = before
