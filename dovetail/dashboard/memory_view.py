"""Memory of each phase: what the plan foresaw against what the workers had."""

from __future__ import annotations

from typing import Any

from dovetail.dashboard.metrics_table import MetricsTable

_GIB = 1024**3
# The plan's phases and the calls in which workers do them.
_CALLS = {
    "rollout": ("generate_sequences",),
    "log-probs": ("compute_log_prob",),
    "reference log-probs": ("compute_ref_log_prob",),
    "values": ("compute_values",),
    "update actor": ("update_actor",),
    "update critic": ("update_critic",),
    "reward model": ("compute_rm_score",),
}


def memory_view(plan: dict[str, Any] | None, peaks: dict[str, float], table: MetricsTable) -> dict[str, Any]:
    """Phases with planned parts and measured GiB. Empty `phases` without a plan."""
    memory = plan.get("memory") if isinstance(plan, dict) else None
    reported = {
        "allocated": _largest(table, "perf/max_memory_allocated_gb"),
        "reserved": _largest(table, "perf/max_memory_reserved_gb"),
        "host": _largest(table, "perf/cpu_memory_used_gb"),
    }
    if not isinstance(memory, dict):
        return {"phases": [], "device": None, "device_gib": None, "reported": reported, "verdict": None}
    phases = []
    for phase in memory.get("phases", []):
        items = {name: size / _GIB for name, size in phase.get("items", {}).items() if size}
        measured = [peaks[call] for call in _CALLS.get(phase["name"], ()) if call in peaks]
        phases.append({"name": phase["name"], "items": items, "measured": max(measured, default=None)})
    return {
        "phases": phases,
        "device": memory.get("device"),
        "device_gib": memory.get("device_bytes", 0) / _GIB or None,
        "reported": reported,
        "verdict": memory.get("verdict"),
    }


def _largest(table: MetricsTable, name: str) -> float | None:
    _, values = table.finite(name)
    return float(values.max()) if len(values) else None
