"""What a reader of the page, or of the command line, is told when something cannot be shown."""

from __future__ import annotations


class DashboardError(Exception):
    """A message for people. `status` is the HTTP answer it becomes; the page shows the message alone."""

    def __init__(self, message: str, *, status: int = 404) -> None:
        super().__init__(message)
        self.status = status
