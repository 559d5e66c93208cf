"""Show runs in a browser: `dovetail dashboard RUN_FOLDER...`. Works while a run goes on and long after it.

A folder that holds several runs (such as `runs`) shows all of them. The page is served to this machine only; from
another one: ssh -L 6262:127.0.0.1:6262 MACHINE.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dovetail.cli.option_types import whole_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="run folders, or folders of them")
    parser.add_argument("--port", type=whole_number(0, 65535), help="port (default: 6262, or a free one)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> int:
    try:
        from dovetail.dashboard.app import bind, build_app, serve
    except ModuleNotFoundError as error:
        sys.stderr.write(f"the dashboard needs {error.name}: pip install 'dovetail[dashboard]'\n")
        return 2
    from dovetail.dashboard.run_files import DashboardError
    from dovetail.dashboard.runs import Runs

    try:
        runs = Runs(args.folders)
        app = build_app(runs)
    except DashboardError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        listening = bind(args.port)
    except OSError as error:
        sys.stderr.write(f"port {args.port} cannot be used: {error.strerror}; leave --port out to take a free one.\n")
        return 2

    def started(address: str) -> None:
        sys.stdout.write(f"{len(runs.find())} run(s) at {address}   (Ctrl+C ends it)\n")
        sys.stdout.flush()
        if args.open:
            import webbrowser

            webbrowser.open(address)

    serve(app, listening, started=started)
    return 0
