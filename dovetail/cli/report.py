"""Write a report of a run: `dovetail report RUN_FOLDER`: one HTML file, complete in itself, and a PNG of the curves."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dovetail.cli.option_types import output_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="the run's folder")
    parser.add_argument("--out", type=output_file, help="HTML file (default: RUN_FOLDER/report.html)")


def run(args: argparse.Namespace) -> int:
    from dovetail.dashboard.run_files import DashboardError

    try:
        from dovetail.dashboard.report import write_report
    except ModuleNotFoundError as error:
        sys.stderr.write(f"reports need {error.name}: pip install 'dovetail[dashboard]'\n")
        return 2
    out: Path = args.out or args.folder / "report.html"
    try:
        written = write_report(args.folder, out)
    except (DashboardError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(f"{file}\n" for file in written))
    return 0
