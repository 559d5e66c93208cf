"""DataProto through Ray against a dict of raw numpy arrays of the same bytes, in the same run.

Both sides take turns, so a busy machine slows both; medians are compared. A local Ray is started on loopback only.
Run: ``python -m benchmarks.dataproto_ray [--rows 1024 --seq-len 4096 --repeats 31]``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

# Without this Ray listens on every interface. It is read when ray is imported.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import numpy as np
import ray
import torch

from dovetail.protocol import DataProto

GOAL = "at most 1.3x the time of raw numpy"


def run(rows: int = 1024, seq_len: int = 4096, repeats: int = 31) -> list[dict[str, Any]]:
    """Measure put + get, and a call that sends the batch to an actor and back. Times are medians in seconds."""
    batch = make_batch(rows, seq_len)
    arrays = as_numpy(batch)
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=max(8 * batch.nbytes, 512 * 2**20),
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
            log_to_driver=False,
        )
    try:
        echo: Any = ray.remote(num_cpus=1)(Echo).remote()
        return [
            _compare(f"dataproto_put_get ({batch.nbytes / 2**20:.0f} MiB)", _put_get, batch, arrays, repeats),
            _compare(
                f"dataproto_actor_round_trip ({batch.nbytes / 2**20:.0f} MiB)",
                lambda value: ray.get(echo.call.remote(value)),
                batch,
                arrays,
                repeats,
            ),
        ]
    finally:
        if started_here:
            ray.shutdown()


class Echo:
    """An actor that gives back what it gets."""

    def call(self, value: Any) -> Any:
        return value


def make_batch(rows: int, seq_len: int) -> DataProto:
    """A batch like the one that enters update_actor: half prompt, half response."""
    generator = torch.Generator().manual_seed(0)
    response = seq_len // 2

    def ids(length: int) -> torch.Tensor:
        return torch.randint(0, 150_000, (rows, length), generator=generator)

    def numbers() -> torch.Tensor:
        return torch.randn(rows, response, generator=generator)

    return DataProto.from_dict(
        {
            "input_ids": ids(seq_len),
            "attention_mask": torch.ones(rows, seq_len, dtype=torch.int64),
            "position_ids": torch.arange(seq_len).repeat(rows, 1),
            "responses": ids(response),
            "response_mask": torch.ones(rows, response, dtype=torch.int64),
            "old_log_probs": numbers(),
            "ref_log_prob": numbers(),
            "advantages": numbers(),
        },
        {"uid": [f"prompt-{row // 8}" for row in range(rows)]},
        {"temperature": 1.0},
    )


def as_numpy(batch: DataProto) -> dict[str, np.ndarray]:
    """The same columns with no DataProto around them."""
    return {**{name: tensor.numpy() for name, tensor in batch.tensors.items()}, **batch.non_tensor_batch}


def _put_get(value: Any) -> Any:
    return ray.get(ray.put(value))


def _compare(
    name: str, send: Callable[[Any], Any], batch: DataProto, arrays: dict[str, np.ndarray], repeats: int
) -> dict[str, Any]:
    for value in (batch, arrays):  # The first touch of shared memory pays for its pages.
        for _ in range(2):
            send(value)
    returned = send(batch)
    assert returned.equals(batch), f"{name}: the batch changed on its way: {returned.difference(batch)}"
    del returned
    ours, other = [], []
    for turn in range(repeats):
        sides = [(ours, batch), (other, arrays)]
        for seconds, value in sides if turn % 2 else reversed(sides):
            seconds.append(_seconds(send, value))
    ours_s, other_s = statistics.median(ours), statistics.median(other)
    return {"name": name, "ours_s": ours_s, "other_s": other_s, "ratio": ours_s / other_s, "goal": GOAL}


def _seconds(send: Callable[[Any], Any], value: Any) -> float:
    start = time.perf_counter()
    result = send(value)
    seconds = time.perf_counter() - start
    del result  # Freed outside the clock, the same for both sides.
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=31)
    arguments = parser.parse_args()
    for result in run(arguments.rows, arguments.seq_len, arguments.repeats):
        print(
            f"{result['name']}: DataProto {result['ours_s'] * 1e3:.1f} ms, raw numpy {result['other_s'] * 1e3:.1f} ms, "
            f"ratio {result['ratio']:.2f} (goal: {result['goal']})"
        )


if __name__ == "__main__":
    main()
