"""Names on the Hugging Face hub, through huggingface_hub's own cache. Downloads files and uploads folders; reads no
model and no data.

A model's path may be a folder or `org/name[@revision]`; a data file may be `hf://datasets/org/name/path`. Several
processes of a machine may ask for the same name: huggingface_hub's file locks let one of them download.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from dovetail.config.wording import nearest

Kind = Literal["model", "dataset"]
DATA_PREFIX = "hf://"

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
# Weights are read from safetensors only; the rest are copies in other formats, and pictures for the model's page.
_NOT_READ = [
    "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.onnx*", "*.h5", "*.msgpack", "*.tflite", "*.png", "*.jpg", "*.md",
    "original/*", "onnx/*",
]  # fmt: skip
# Configuration, tokenizer and processor: everything beside the weights.
_READERS = ["*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken"]
_SECONDS_FOR_AN_ANSWER = 10


class HubError(FileNotFoundError):
    """A name on the hub that cannot be had here; the message says where to put it."""


def is_hub_name(path: str | Path) -> bool:
    """Whether a model's path is a name on the hub: `org/name` or `org/name@revision`, and no folder of this machine."""
    return _NAME.fullmatch(str(path)) is not None and not Path(path).exists()


@lru_cache(maxsize=64)
def fetch_model(name: str, *, weights: bool) -> Path:
    """The folder of a model on the hub, in the cache; without `weights` only what describes it."""
    from huggingface_hub import snapshot_download

    wanted = {"allow_patterns": None if weights else _READERS, "ignore_patterns": _NOT_READ}
    return _download(snapshot_download, name, "model", **wanted)


def fetch_file(name: str, filename: str, *, kind: Kind = "model") -> Path:
    """One file of a repository. A copy in the cache is taken as it is: nobody is asked whether it is the newest."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    repository, revision = _parts(name)
    cached = try_to_load_from_cache(repository, filename, revision=revision, repo_type=kind)
    return Path(cached) if isinstance(cached, str) else _download(hf_hub_download, name, kind, filename=filename)


def fetch_folder(name: str, folder: str, *, kind: Kind) -> Path:
    """One folder of a repository, in the cache."""
    from huggingface_hub import constants, snapshot_download

    fetched = _download(snapshot_download, name, kind, allow_patterns=[f"{folder}/*"]) / folder
    if not fetched.is_dir():
        # Where the hub does not answer, huggingface_hub returns the snapshot of the cache, whatever is in it.
        reason = (
            f"it has no such folder, or {constants.ENDPOINT} cannot be reached and the cache does not have all of it"
        )
        raise HubError(_explain(name, kind, reason, folder))
    return fetched


def _download(download: Callable[..., str], name: str, kind: Kind, **wanted: Any) -> Path:
    repository, revision = _parts(name)
    how = {"etag_timeout": _SECONDS_FOR_AN_ANSWER, "local_files_only": not _can_be_asked()}
    try:
        return Path(download(repository, revision=revision, repo_type=kind, **how, **wanted))
    except _errors() as error:
        raise HubError(_explain(name, kind, _reason(error), wanted.get("filename"))) from error


def make_repository(name: str) -> None:
    """Make the repository that a folder is pushed to, a private one, unless it is there."""
    from huggingface_hub import HfApi, constants, get_token

    if _parts(name) != (name, None):
        raise HubError(f"{name} names a revision, and a folder is pushed to the newest one; use {_parts(name)[0]}.")
    if constants.HF_HUB_OFFLINE or not _can_be_asked():
        why = "HF_HUB_OFFLINE=1 forbids it" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise HubError(
            f"{name} cannot be pushed to: {why}. Export to a folder, and run `hf upload {name} FOLDER` later."
        )
    if get_token() is None:
        raise HubError(f"{name} cannot be pushed to without a token; run `hf auth login`, or set HF_TOKEN.")
    try:
        HfApi().create_repo(name, private=True, exist_ok=True)
    except _errors() as error:
        raise HubError(_refusal(name, error)) from error


def push_folder(folder: Path, name: str) -> None:
    """Upload a model's folder as one commit to a repository that `make_repository` has made."""
    from huggingface_hub import HfApi

    try:
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a model exported by dovetail")
    except _errors() as error:
        raise HubError(f"{_refusal(name, error)} The model is in {folder}.") from error


def _refusal(name: str, error: Exception) -> str:
    return f"the hub does not take {name}: {error}. Check that the token may write to {name.partition('/')[0]}."


def _can_be_asked() -> bool:
    """False without a network: huggingface_hub would try for half a minute, with a line for each attempt."""
    from huggingface_hub import constants

    if getproxies():
        return True  # which resolve names themselves
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


def _parts(name: str) -> tuple[str, str | None]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise HubError(
            f"{name} is no name on the hub; they look like Qwen/Qwen2.5-0.5B-Instruct, or org/name@revision."
        )
    return match[1], match[2]


def _errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises when something cannot be had: its own errors and those of its HTTP library."""
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, HTTPError

    return (OSError, EntryNotFoundError, HFValidationError, HTTPError)


def _explain(name: str, kind: Kind, reason: str, part: str | None = None) -> str:
    from huggingface_hub import constants

    repository, _ = _parts(name)
    cache = Path(constants.HF_HUB_CACHE) / f"{kind}s--{repository.replace('/', '--')}"
    type_of = "" if kind == "model" else " --repo-type dataset"
    what = f"{part} of {name}" if part else name
    models = [str(file.parent) for file in Path(name).parent.glob("*/config.json")] if kind == "model" else []
    near = f" (did you mean {meant}?)" if (meant := nearest(name, models)) else ""
    either = f"{name} is no folder on this machine{near}, and" if kind == "model" else f"{name}:"
    return (
        f"{either} the Hugging Face hub cannot give {what}: {reason}. Give a local path, or put it into the "
        f"cache folder {cache}: run `hf download {repository}{type_of}` where the hub can be reached, then copy the "
        "folder of that name here."
    )


def _reason(error: Exception) -> str:
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE=1 forbids asking, and the cache does not have it"
    reasons = {
        # A gated repository is also one that is not found.
        errors.GatedRepoError: "its licence must be accepted on its page first, and HF_TOKEN must be set",
        errors.RepositoryNotFoundError: "there is no such repository, or it is private and HF_TOKEN is not set",
        errors.RevisionNotFoundError: "it has no such revision",
        errors.RemoteEntryNotFoundError: "it has no such file",
    }
    otherwise = f"{constants.ENDPOINT} cannot be reached, and the cache does not have all of it"
    return next((reason for kind, reason in reasons.items() if isinstance(error, kind)), otherwise)
