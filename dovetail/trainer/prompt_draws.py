"""Number every prompt that a run samples (a draw), and derive group ids and sampling seeds from the number.

A seed depends only on the run's seed and the draw, so responses do not depend on batching, on the number of workers,
or on what was filtered out; a resumed run samples the same ones. Knows nothing of engines.
"""

from __future__ import annotations

import hashlib

import numpy as np

from dovetail.protocol import DataProto


class PromptDraws:
    """The counter is checkpoint state."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.num_drawn = 0

    def number(self, prompts: DataProto) -> DataProto:
        """The prompts with `uid` and `sampling_seed`; each draw of a prompt is a group of its own."""
        first, self.num_drawn = self.num_drawn, self.num_drawn + len(prompts)
        numbers = range(first, self.num_drawn)
        return with_seeds(prompts, [f"draw-{number}" for number in numbers], self._seed)


def with_seeds(prompts: DataProto, uids: list[str], seed: int) -> DataProto:
    """The prompts with these group ids, and seeds made from them."""
    seeds = np.array([stable_seed(seed, uid) for uid in uids], dtype=np.int64)
    columns = DataProto.from_dict(non_tensors={"uid": np.array(uids, dtype=object), "sampling_seed": seeds})
    return prompts.union(columns)


def stable_seed(seed: int, name: str) -> int:
    """63 bits, the same on every machine and in every process."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
