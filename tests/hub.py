"""A Hugging Face hub for tests: a cache folder in the hub's own layout, and a server on loopback."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put_in_cache(cache: Path, name: str, folder: Path, *, kind: str = "model") -> Path:
    """Copy `folder` into `cache` as huggingface_hub would have left it after a download; returns the snapshot."""
    place = cache / f"{kind}s--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    snapshot = place / "snapshots" / COMMIT
    shutil.copytree(folder, snapshot)
    return snapshot


class FakeApi:
    """huggingface_hub's client of a user who may write to every organisation but `theirs`."""

    made: ClassVar[list[tuple[str, dict[str, object]]]] = []
    uploads: ClassVar[dict[str, list[str]]] = {}
    """Repository -> the files that were in the folder."""

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> type[FakeApi]:
        """A hub that can be reached with a token."""
        monkeypatch.setattr("huggingface_hub.HfApi", cls)
        monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_token")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("dovetail.config.hub._can_be_asked", lambda: True)
        monkeypatch.setattr(cls, "made", [])
        monkeypatch.setattr(cls, "uploads", {})
        return cls

    def create_repo(self, repo_id: str, **options: object) -> None:
        if repo_id.startswith("theirs/"):
            raise OSError("403 Forbidden")
        self.made.append((repo_id, options))

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        assert commit_message
        self.uploads[repo_id] = sorted(file.name for file in folder_path.iterdir())


class Downloads:
    """What clients took from the server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.count: Counter[str] = Counter()


@contextmanager
def serve_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Downloads]:
    """`{"models/org/name": {"config.json": b"..."}}` on a free port of loopback, as HF_ENDPOINT."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    downloads = Downloads(f"http://127.0.0.1:{server.server_port}")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, *words: object) -> None: ...

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0].strip("/")
            api = path.startswith("api/")
            parts = path.removeprefix("api/").split("/")
            if not api and parts[0] != "datasets":
                parts = ["models", *parts]
            files = repositories.get("/".join(parts[:3]))
            action, rest = (parts[3:] or [""])[0], "/".join(parts[5:])
            if files is None:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
            elif api and action == "tree":
                entries = [
                    {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
                    for name, content in files.items()
                ]
                self._send(200, json.dumps(entries).encode(), {}, with_body)
            elif api:
                siblings = [{"rfilename": name} for name in files]
                about = {"id": "/".join(parts[1:3]), "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0}
                self._send(200, json.dumps(about).encode(), {}, with_body)
            elif rest not in files:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, with_body)
            else:
                if with_body:
                    downloads.count[rest] += 1
                headers = {"ETag": f'"{_oid(files[rest])}"', "X-Repo-Commit": COMMIT}
                self._send(200, files[rest], headers, with_body)

        def _send(self, status: int, body: bytes, headers: Mapping[str, str], with_body: bool) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server.RequestHandlerClass = Handler
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield downloads
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
