"""A real Chromium, and `dovetail dashboard` in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Containers run as root, where Chromium's own sandbox does not start.
_FLAGS = ["--no-sandbox", "--disable-gpu"]
# A page finds an empty storage, whatever the pages before it have left.
_EMPTY_STORAGE = """
if (location.protocol.startsWith("http") && !sessionStorage.getItem("empty")) {
  localStorage.clear();
  sessionStorage.setItem("empty", "yes");
}
"""
# Addresses of the replies that the page has read. A timer runs after everything that awaited the reply.
_RECORD_READ = """
window.read = [];
const json = Response.prototype.json;
Response.prototype.json = function () {
  const reply = json.call(this);
  reply.then(() => setTimeout(() => window.read.push(this.url)));
  return reply;
};
"""


def chromium() -> str:
    """Where the browser is; `make browser` installs one."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(f"these tests need a browser, and there is none of {', '.join(_NAMES)}; run `make browser`.")
    return found


@contextmanager
def open_browser(playwright: Playwright) -> Iterator[Browser]:
    """A headless browser that keeps nothing of one context for the next."""
    browser = playwright.chromium.launch(executable_path=chromium(), args=_FLAGS)
    try:
        yield browser
    finally:
        browser.close()


@contextmanager
def open_profile(playwright: Playwright, folder: Path) -> Iterator[BrowserContext]:
    """A headless browser that keeps compiled scripts in a folder, as a user's does.

    Without them every page compiles plotly.js again, which is most of its time.
    """
    keep_at_once = "--blink-settings=v8CacheOptions=3"  # at the first page, not at the second
    profile = playwright.chromium.launch_persistent_context(
        folder, executable_path=chromium(), args=[*_FLAGS, keep_at_once], viewport={"width": 1280, "height": 900}
    )
    profile.add_init_script(_EMPTY_STORAGE)
    try:
        yield profile
    finally:
        profile.close()


@dataclass(frozen=True)
class Server:
    """A running `dovetail dashboard`."""

    address: str
    pid: int

    def resident_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def serve(*folders: Path) -> Iterator[Server]:
    """The command itself, on a free port."""
    command = [sys.executable, "-m", "dovetail.cli.main", "dashboard", *map(str, folders), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "http://127.0.0.1:" in said, f"the dashboard said {said!r}"
        yield Server(said.split(" at ")[1].split()[0], process.pid)
    finally:
        process.terminate()
        process.wait(60)


def show(page: Page, server: Server, place: str = "") -> Page:
    """Open a view and wait until it has what it asked for. Errors in the page fail the test."""
    if not hasattr(page, "problems"):
        page.problems = []  # type: ignore[attr-defined]
        page.add_init_script(_RECORD_READ)
        page.on("pageerror", lambda error: page.problems.append(str(error)))  # type: ignore[attr-defined]
        page.on("console", lambda said: page.problems.append(said.text) if said.type == "error" else None)  # type: ignore[attr-defined]
    page.goto("about:blank")
    page.goto(f"{server.address}/{place}")
    page.wait_for_selector(".view[data-ready]")
    return page


def go(page: Page, server: Server, place: str) -> None:
    """To another view of the page that is open."""
    page.goto(f"{server.address}/{place}")
    page.wait_for_selector(f".view.{place.split('view=')[1].split('&')[0]}[data-ready]")


def drawn(page: Page, chart: str) -> None:
    """Wait until a chart is drawn."""
    page.locator(f'.plot[data-chart="{chart}"]').scroll_into_view_if_needed()
    page.wait_for_selector(f'.plot[data-chart="{chart}"][data-drawn]')


def seconds_to_first_view(page: Page, server: Server) -> float:
    """From asking for the page to the first frame with numbers and curves, with a core to itself.

    Where other programs share the cores, the time on the clock is multiplied by the share of a core that is to be had.
    """
    before = share_of_a_core()
    page.goto(server.address, wait_until="commit")
    question = "() => performance.getEntriesByName('first-view')[0]?.startTime ?? null"
    until(page, f"() => ({question})() !== null", seconds=120.0)
    return page.evaluate(question) / 1000 * (before + share_of_a_core()) / 2


def share_of_a_core(seconds: float = 0.2) -> float:
    """Computing time per time on the clock, measured for a moment; 1 on a quiet machine."""
    start, busy = time.perf_counter(), time.process_time()
    while time.process_time() - busy < seconds:
        pass
    return min(1.0, seconds / (time.perf_counter() - start))


def until(page: Page, question: str, *, seconds: float = 30.0) -> None:
    """Ask until the answer is yes. The page forbids `eval`, which Playwright's own waiting would need."""
    poll(page, lambda: page.evaluate(question), question, seconds=seconds)


def poll(page: Page, ask: Callable[[], Any], what: str, *, seconds: float = 30.0) -> None:
    """Ask until the answer is yes, while events of the page are still received; `tests.waiting` would hold them up."""
    end = time.monotonic() + seconds
    while not ask():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        page.wait_for_timeout(50)
