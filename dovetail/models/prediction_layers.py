"""Layers that only predict further tokens (multi-token prediction), which engines use for speculative decoding.

transformers leaves them out, so they are not trained. An exported folder has them as the folder that the training began
with, or does not declare them. Runs none of them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from dovetail.models.load import reader_folder
from dovetail.models.weights import iter_checkpoint_tensors

logger = logging.getLogger(__name__)

_NAMED = re.compile(r"(^|\.)mtp(_\w+)?(\.|$)")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_DECLARING = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")


def is_prediction_layer(name: str, config: Any) -> bool:
    """Whether a tensor on disk, which the model has no place for, belongs to such a layer: by its name, or because the
    config says how many follow the last one."""
    if _NAMED.search(name):
        return True
    config = config.get_text_config()
    layer, extra = _LAYER.search(name), getattr(config, "num_nextn_predict_layers", 0) or 0
    return bool(layer and 0 <= int(layer[2]) - config.num_hidden_layers < extra)


class PredictionLayers:
    """Those of the folder a model was read from, for the folder it is exported to."""

    def __init__(self, source: str | Path | None) -> None:
        self._source = source
        self._copied = 0

    def after(self, weights: Iterator[tuple[str, Tensor]], config: Any) -> Iterator[tuple[str, Tensor]]:
        """The model's own tensors under their names on disk, and then these, as they are in the source."""
        written: set[str] = set()
        for name, tensor in weights:
            written.add(name)
            yield name, tensor
        if self._source is None or not _has_as_many_layers(self._source, config):
            return
        # A tower of another kind, which a text-only model leaves out, has layers of its own.
        prefixes = {name[: layer.start()] for name in written if (layer := _LAYER.search(name))}
        for name, tensor in iter_checkpoint_tensors(self._source):
            layer = _LAYER.search(name)
            is_wanted = _NAMED.search(name) or (layer and name[: layer.start()] in prefixes)
            if name not in written and is_wanted and is_prediction_layer(name, config):
                self._copied += 1
                yield name, tensor.load()

    def describe(self, config: Any) -> None:
        """Say in `config`, that of the exported folder, and in the log what was written."""
        if self._copied:
            logger.warning(
                "%d tensors of layers that predict further tokens are copied from %s as they are: training does not "
                "change them, so speculative decoding with them may accept fewer tokens than before.",
                self._copied,
                self._source,
            )
            return
        text = config.get_text_config()
        for key in _DECLARING:
            if declared := getattr(text, key, 0):
                setattr(text, key, 0)
                logger.warning(
                    "the exported config.json has %s=0 instead of %s: the weights of these layers are not in %s.",
                    key,
                    declared,
                    self._source or "a model of this kind",
                )


def _has_as_many_layers(source: str | Path, config: Any) -> bool:
    """Behind fewer layers (`override_config`) their input is another one."""
    own = type(config).from_pretrained(reader_folder(source))  # a class of the folder's own code is trusted by now
    counts = {getattr(one.get_text_config(), "num_hidden_layers", None) for one in (own, config)}
    return len(counts) == 1
