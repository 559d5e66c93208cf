"""What can be wrong with data."""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)

_MOST_SHOWN, _MOST_ALIKE = 20, 2


class DataError(ValueError):
    """A file, a column or a prompt that cannot be used. The message names it and the way out."""


class DataNotHereError(DataError):
    """A file on the hub that this machine cannot get; another one may."""


def refuse_rows(refused: Sequence[str], *, skip: bool) -> None:
    """Raise for rows that cannot be used, a line each; with `skip` (`data.skip_bad_rows`) only say that they are left
    out."""
    if not refused:
        return
    head = f"{len(refused)} row{'s' * (len(refused) != 1)} cannot be used:"
    alike = len({line.partition(": ")[2] for line in refused}) == 1  # a model without a chat template: every row
    most = _MOST_ALIKE if alike else _MOST_SHOWN
    more = [f"and {len(refused) - most} more"] if len(refused) > most else []
    listed = "\n  ".join([head, *refused[:most], *more])
    if not skip:
        raise DataError(f"{listed}\nMend these rows, or set data.skip_bad_rows=True to leave them out.")
    logger.warning("%s\nLeft out, as data.skip_bad_rows=True says.", listed)
