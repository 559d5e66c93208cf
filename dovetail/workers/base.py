"""What the actor and the critic of PPO promise to the worker that holds them. Says nothing about how they compute."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from dovetail.protocol import DataProto


class BasePPOActor(ABC):
    """A policy: log-probs of given responses, and updates."""

    @abstractmethod
    def compute_log_prob(self, data: DataProto, calculate_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the responses (and entropies) under the current weights, rows in the order given, on the CPU."""

    @abstractmethod
    def update_policy(self, data: DataProto) -> dict[str, float]:
        """PPO epochs over mini-batches, one optimizer step each; metrics over all data-parallel ranks."""


class BasePPOCritic(ABC):
    """A value network: values of given responses, and updates."""

    @abstractmethod
    def compute_values(self, data: DataProto) -> Tensor:
        """The value before each response token, 0 outside the response mask, rows in the order given, on the CPU."""

    @abstractmethod
    def update_critic(self, data: DataProto) -> dict[str, float]:
        """Epochs over mini-batches, one optimizer step each; metrics over all data-parallel ranks."""
