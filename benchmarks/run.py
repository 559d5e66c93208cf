"""Run the CPU benchmarks and print each as a ratio against the alternative measured in the same run."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

BENCHMARKS = ("group_estimators", "dataproto_ray", "fused_head", "packing", "rollout", "agent_throughput")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")

    rows: list[dict] = []
    for name in args.names or BENCHMARKS:
        rows += importlib.import_module(f"benchmarks.{name}").run()
    print(format_table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


def format_table(rows: list[dict]) -> str:
    """One line per row: what was measured, ours, the other's, the ratio and the goal."""
    width = max((len(row["name"]) for row in rows), default=4)
    lines = [f"{'what':<{width}}  {'ours (s)':>10}  {'other (s)':>10}  {'ratio':>7}  goal"]
    for row in rows:
        numbers = f"{row['ours_s']:>10.4f}  {row['other_s']:>10.4f}  {row['ratio']:>6.2f}x"
        lines.append(f"{row['name']:<{width}}  {numbers}  {row['goal']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
