"""Settings every test shares: one thread per process, no network, fixed seed."""

import os
from collections.abc import Iterator
from concurrent.futures import Future

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray's workers would stand back behind everything else that runs, and here other tests' work does.
os.environ.setdefault("RAY_worker_niceness", "0")

import pytest

from tests.ahead import Key, in_order_of_waiting, starting, waits_for_work


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that waits for work done ahead comes late, and may have to wait for what is queued before it, too."""
    items[:] = in_order_of_waiting(items)
    for item in items:
        if waits_for_work(item) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session", autouse=True)
def started_ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Key, Future]]:
    """Begins with the first test; see `tests.ahead`."""
    with starting(request.session.items, tmp_path_factory.mktemp) as started:
        yield started


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _level_of_worker_logs_as_it_was() -> Iterator[None]:
    """A command called in a test sets it for the workers it starts; those of later tests would be silent."""
    before = os.environ.get("DOVETAIL_LOGGING_LEVEL")
    yield
    os.environ.pop("DOVETAIL_LOGGING_LEVEL", None)
    if before is not None:
        os.environ["DOVETAIL_LOGGING_LEVEL"] = before
