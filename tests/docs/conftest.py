"""Pages are carried out two at a time, in processes of their own, while the tests before them run.

A test that asks for `carried_out` waits for its own page. Its module has `prepare(folder)`, called once, and
`carry_out(page, prepared, folder)`, called on a thread for the parameter of every such test that was selected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest


@pytest.fixture(scope="session", autouse=True)
def _pages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    asking = [item for item in request.session.items if "carried_out" in getattr(item, "fixturenames", ())]
    prepared = {module: module.prepare(tmp_path_factory.mktemp("prepared")) for module in {i.module for i in asking}}
    pool = ThreadPoolExecutor(max_workers=2)
    pages = {}
    for item in asking:
        [page] = item.callspec.params.values()
        folder = tmp_path_factory.mktemp("page")
        pages[item.nodeid] = pool.submit(item.module.carry_out, page, prepared[item.module], folder)
    yield pages
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def carried_out(_pages: dict[str, Future], request: pytest.FixtureRequest) -> Callable[[], None]:
    """Waits until the page of this test is done and raises what was wrong with it."""
    return _pages[request.node.nodeid].result
