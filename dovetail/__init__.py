"""Dovetail: reinforcement-learning post-training for language models. Imports nothing heavy by itself."""

import os

__version__ = "0.1.0"

# Ask PyTorch to back large CPU tensors with huge pages: a batch column of 128 MiB is otherwise paid for in 32,768 page
# faults, which cost more than the arithmetic on it. PyTorch reads this once, at its first allocation; the user's own
# setting wins.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
