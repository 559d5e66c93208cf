"""Which megatron-core this backend works with, checked when a backend is built. Imports no more of it than that."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

OLDEST, NEWEST = Version("0.16.0"), Version("0.16.99")
"""The releases whose internals the modules here were written for. 0.16.1 is the last one for Python 3.11."""


def check_version() -> Version:
    """The version in use; an error with the fix when there is none, or one that was not tried."""
    try:
        installed = Version(metadata.version("megatron-core"))
    except metadata.PackageNotFoundError:
        installed = _vendored_version()
    if not OLDEST <= installed <= NEWEST:
        raise ImportError(
            f"megatron-core {installed} is installed and strategy=megatron works with {OLDEST} to {NEWEST}: it reaches "
            "into parts that change between releases. Install megatron-core==0.16.1, or use strategy=fsdp2."
        )
    return installed


def _vendored_version() -> Version:
    """Of a copy that was put on the path without being installed."""
    try:
        from megatron.core.package_info import __version__
    except ImportError as error:
        raise ImportError(
            "strategy=megatron needs megatron-core, which is not installed; install megatron-core==0.16.1 (and psutil, "
            "which its checkpoints need), or use strategy=fsdp2."
        ) from error
    return Version(__version__)
