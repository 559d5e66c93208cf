"""Dovetail: reinforcement-learning post-training for language models. Imports nothing heavy by itself."""

__version__ = "0.1.0"
