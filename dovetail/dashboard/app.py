"""The dashboard's web application: one page and what it asks for. Reads run folders; writes nothing, calls nobody.

Handlers run one after another in the event loop: each is short, and readers need no locks.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from dovetail.dashboard.async_view import WAIT_WORDS, is_asynchronous, staleness
from dovetail.dashboard.charts import ASYNC, OVERVIEW, Chart, headlines, is_missed, names_of, points
from dovetail.dashboard.config_view import config_rows
from dovetail.dashboard.health import RULE_TITLES
from dovetail.dashboard.responses import Filter, Kind, Order, Wish
from dovetail.dashboard.run_files import DashboardError
from dovetail.dashboard.runs import Run, Runs
from dovetail.dashboard.step_times import phase_words, phases, what_it_waits_for
from dovetail.dashboard.trajectories import time_of_trajectories

_PAGE = Path(__file__).parent / "page"
# A page of another site must not reach this server through a name it controls (DNS rebinding).
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_SEARCH_S = 0.4
_MOST_IDLE_STEPS = 100

Name = Annotated[str, Query(max_length=300)]
Step = Annotated[int, Query(ge=0, le=10**9)]
Row = Annotated[int, Query(ge=0, le=10**9)]
Cursor = Annotated[int, Query(ge=-1, le=10**9)]
Words = Annotated[str, Query(max_length=300)]


def build_app(runs: Runs) -> FastAPI:
    """The application over these runs."""
    app = FastAPI(title="dovetail", docs_url=None, redoc_url=None, openapi_url=None)
    _guard(app)
    _serve_page(app)
    _serve_numbers(app, runs)
    _serve_responses(app, runs)
    _serve_settings(app, runs)
    return app


def plotly_file() -> Path:
    """The chart library, from the installed package itself."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or not spec.submodule_search_locations:
        raise DashboardError("the dashboard needs plotly: pip install 'dovetail[dashboard]'", status=500)
    return Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"


def _guard(app: FastAPI) -> None:
    @app.middleware("http")
    async def check(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        host = request.headers.get("host", "").rsplit(":", 1)[0]
        if host not in _HOSTS:
            response: Response = _error("this page is for this machine only; open it as http://127.0.0.1.", 421)
        elif request.method not in ("GET", "HEAD"):
            response = _error("the dashboard only reads.", 405)
        else:
            response = await call(request)
        response.headers.update(_HEADERS)
        return response

    @app.exception_handler(DashboardError)
    async def say(request: Request, error: DashboardError) -> Response:
        return _error(str(error), error.status)

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _error(f"{first['loc'][-1]}: {first['msg']}", 422)

    @app.exception_handler(HTTPException)
    async def not_there(request: Request, error: HTTPException) -> Response:
        return _error("there is nothing at this address.", error.status_code)

    @app.exception_handler(Exception)
    async def apologise(request: Request, error: Exception) -> Response:
        # Starlette logs the traceback; the page gets none of it.
        return _error("the dashboard failed to answer; its log in the terminal says why.", 500)


def _serve_page(app: FastAPI) -> None:
    plotly = plotly_file()

    @app.get("/")
    async def index() -> Response:
        return FileResponse(_PAGE / "index.html")

    @app.get("/plotly.min.js")
    async def chart_library() -> Response:
        return FileResponse(plotly, media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})

    app.mount("/page", StaticFiles(directory=_PAGE))


def _serve_numbers(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs")
    async def all_runs() -> list[dict[str, Any]]:
        return [_listed(run) for run in runs.find()]

    @app.get("/api/pulse")
    async def pulse(run: Annotated[list[str], Query(max_length=20)]) -> dict[str, Any]:
        known = {entry.name: entry for entry in runs.find()}
        stamps = {name: known[name].stamp() for name in run if name in known}
        return {"stamps": stamps, "num_runs": len(known), "num_not_listed": runs.num_not_listed}

    @app.get("/api/overview")
    async def overview(
        run: Name,
        smoothing: Annotated[float, Query(ge=0, lt=1)] = 0.0,
        first: Step | None = None,
        last: Step | None = None,
        most: Annotated[int, Query(ge=10, le=5000)] = 500,
        extra: Annotated[list[str] | None, Query(max_length=30)] = None,
    ) -> dict[str, Any]:
        loaded = runs.get(run)
        charts = [*OVERVIEW, *(Chart(name, name, (name,)) for name in extra or [])]
        return {
            "status": loaded.status(),
            "cards": headlines(loaded.metrics),
            "charts": _lines(loaded, charts, smoothing=smoothing, most=most, first=first, last=last),
            "events": loaded.events.marks(),
            "names": loaded.metrics.names,
            "warnings": loaded.health(),
        }

    @app.get("/api/time")
    async def time_view(run: Name, most: Annotated[int, Query(ge=10, le=1000)] = 120) -> dict[str, Any]:
        loaded = runs.get(run)
        steps = loaded.timelines.steps
        words = phase_words(loaded.timelines)
        rates = [name for name in loaded.metrics.names if name == "perf/throughput" or name.startswith("perf/mfu/")]
        return {
            "status": loaded.status(),
            "phases": phases(loaded.metrics, most, words),
            "waits": what_it_waits_for(loaded.metrics, loaded.timelines),
            "rates": {name: points(loaded.metrics, name, smoothing=0.0) for name in rates},
            "memory": loaded.memory(),
            "trajectories": time_of_trajectories(loaded.metrics, most),
            "timeline_steps": [steps[0], steps[-1]] if steps else None,
            "words": words,
            "wait_words": WAIT_WORDS,
        }

    @app.get("/api/async")
    async def async_view(run: Name) -> dict[str, Any]:
        loaded = runs.get(run)
        steps = loaded.timelines.steps
        return {
            "status": loaded.status(),
            "charts": [chart for chart in _lines(loaded, ASYNC) if chart["lines"]],
            "staleness": staleness(loaded.metrics),
            "idle": loaded.timelines.idle(_MOST_IDLE_STEPS),
            "timeline_steps": [steps[0], steps[-1]] if steps else None,
            "words": phase_words(loaded.timelines),
            "wait_words": WAIT_WORDS,
        }

    @app.get("/api/timeline")
    async def timeline(run: Name, step: Step, count: Annotated[int, Query(ge=1, le=50)] = 1) -> dict[str, Any]:
        value = runs.get(run).timelines.of(step, count)
        if value is None:
            raise DashboardError(f"step {step} has no timeline.")
        return value


def _serve_responses(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/steps")
    async def steps(run: Name, kind: Kind = "rollouts") -> dict[str, Any]:
        loaded = runs.get(run)
        steps = loaded.responses(kind).steps()
        numbers = loaded.responses(kind).token_numbers(steps[-1]) if steps else []
        if not is_asynchronous(loaded.metrics):
            numbers = [name for name in numbers if name != "token_versions"]
        return {"steps": steps, "numbers": numbers}

    @app.get("/api/groups")
    async def groups(
        run: Name,
        step: Step,
        kind: Kind = "rollouts",
        wanted: Filter = "all",
        words: Words = "",
        order: Order = "recorded",
        outcome: Words = "",
        tool: Words = "",
        first: Row = 0,
        count: Annotated[int, Query(ge=1, le=100)] = 10,
    ) -> dict[str, Any]:
        wish = Wish(wanted, words, order, outcome, tool)
        return runs.get(run).responses(kind).page(step, wish, first=first, count=count)

    @app.get("/api/answer")
    async def answer(run: Name, step: Step, row: Row, kind: Kind = "rollouts") -> dict[str, Any]:
        return runs.get(run).responses(kind).response(step, row)

    @app.get("/api/search")
    async def search(
        run: Name, kind: Kind = "rollouts", wanted: Filter = "all", words: Words = "", cursor: Cursor = -1
    ) -> dict[str, Any]:
        return runs.get(run).responses(kind).search(Wish(wanted, words), cursor=cursor, seconds=_SEARCH_S, most=40)

    @app.get("/api/same-prompt")
    async def same_prompt(
        run: Name, step: Step, row: Row, kind: Kind = "rollouts", cursor: Cursor = -1
    ) -> dict[str, Any]:
        return runs.get(run).responses(kind).steps_with_prompt(step, row, cursor=cursor, seconds=_SEARCH_S)

    @app.get("/api/group")
    async def group(
        run: Name, step: Step, key: Annotated[str, Query(max_length=64)], kind: Kind = "rollouts"
    ) -> dict[str, Any]:
        return runs.get(run).responses(kind).group_of_prompt(step, key)


def _serve_settings(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/config")
    async def config(run: Name, other: Name = "") -> dict[str, Any]:
        other_values = runs.get(other).config() if other else None
        return {"rows": config_rows(runs.get(run).config(), other_values)}

    @app.get("/api/health")
    async def health(run: Name) -> dict[str, Any]:
        loaded = runs.get(run)
        return {"warnings": loaded.health(), "rules": RULE_TITLES, "num_steps": len(loaded.metrics)}


def _listed(run: Run) -> dict[str, Any]:
    try:
        run.refresh()
        return run.status()
    except DashboardError as error:
        return {"name": run.name, "state": "gone", "step": None, "total_steps": None, "message": str(error)}


def _lines(run: Run, charts: Iterable[Chart], **cut: Any) -> list[dict[str, Any]]:
    """Charts with the points of their metrics."""
    table = run.metrics
    return [
        {
            "key": chart.key,
            "title": chart.title,
            "lines": {name: points(table, name, **cut) for name in names_of(chart, table.names)},
            "absent": chart.absent,
            "share": chart.share,
        }
        for chart in charts
        if names_of(chart, table.names) or is_missed(chart, table.names)
    ]


def _error(message: str, status: int) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)


HOST = "127.0.0.1"
DEFAULT_PORT = 6262


def bind(port: int | None) -> socket.socket:
    """A listening place. Without a wish: the default port, or any free one when it is taken."""
    try:
        # It listens already: who reads the address may connect at once, before the server has started.
        return socket.create_server((HOST, DEFAULT_PORT if port is None else port))
    except OSError:
        if port is not None:
            raise
        return socket.create_server((HOST, 0))


def serve(app: FastAPI, listening: socket.socket, *, started: Callable[[str], None]) -> None:
    """Answer until interrupted. `started` gets the address once the port is bound."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    started(f"http://{HOST}:{listening.getsockname()[1]}")
    uvicorn.Server(config).run(sockets=[listening])
