"""Which tensors a model takes, under their names on disk, and streams checked against them. Loads no weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, Unpack

import torch

from dovetail.models.weights import to_checkpoint_tensors
from dovetail.rollout.base import ModelArgs, WeightUpdateError
from dovetail.weight_sync import ExpectedWeights, GatheredWeights, NamedTensors, WeightAccount

_SHAPE_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "tie_word_embeddings"),
)


def expected_weights(model: str | Path, **args: Unpack[ModelArgs]) -> ExpectedWeights:
    """Names and shapes that `update_weights` must bring: those of the model that a trainer builds from this folder."""
    from dovetail.models.load import build_meta_model

    empty = build_meta_model(model, attn_implementation="eager", **args)
    ties = tied_parameters(empty)
    shapes = shapes_of(to_checkpoint_tensors(empty, empty.named_parameters()))
    tied_shapes = shapes_of((name, empty.get_parameter(name)) for name in ties)
    known_ties = {name: own for name, own in ties.items() if own in shapes}
    return ExpectedWeights(shapes | tied_shapes, known_ties, shapes_of(stored_buffers(empty).items()))


def tied_parameters(model: torch.nn.Module) -> dict[str, str]:
    """Further names of parameters that have several, and the first name of each."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(own), name) for name, own in model.named_parameters(remove_duplicate=False)}
    return {name: own for name, own in names.items() if name != own}


def stored_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers of a checkpoint (the bias of a sigmoid router): they may be sent, none must, they are not trained."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def shapes_of(tensors: NamedTensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors}


class CheckedWeights:
    """The tensors that fit, until one does not: vLLM and SGLang pass over a tensor they do not know, and SGLang dies of
    one with another shape. The source is read to its end even so, and WeightUpdateError is raised
    there: gathering a sharded source is collective, so a rank that stops early leaves the others in a collective. As a
    context manager it reads the source to its end when the update fails in between. A tied tensor goes once, under the
    one name that engines load it by."""

    def __init__(self, weights: NamedTensors, expected: ExpectedWeights) -> None:
        self._weights = GatheredWeights(weights)
        self._ties = expected.ties
        self._account = WeightAccount(expected)
        self._sent: set[str] = set()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        problem: str | None = None
        for name, tensor in self._weights:
            problem = problem or self._account.problem_with(name, tuple(tensor.shape))
            own = self._ties.get(name, name)
            if problem is None and own not in self._sent:
                self._sent.add(own)
                yield own, tensor.detach()
        problem = problem or self._account.missing()
        if problem is not None:
            raise WeightUpdateError(problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is not None:
            self._weights.drain()


def model_shape(config: Any) -> dict[str, Any]:
    """The sizes of a transformers config that decide whether two models can have the same weights."""
    text = config.get_text_config()
    sizes = {name: getattr(text, name, None) for name in _SHAPE_FIELDS}
    return {name: value for name, value in sizes.items() if value is not None}
