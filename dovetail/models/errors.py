"""What can be wrong with a model folder."""

from __future__ import annotations


class ModelError(ValueError):
    """A file of a model folder that cannot be used. The message names it and the way out; it travels from workers."""


class PackingError(ModelError, NotImplementedError):
    """A model that computes attention in a way that packed rows cannot have."""
