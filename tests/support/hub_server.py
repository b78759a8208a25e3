"""A Hugging Face hub on loopback, with the routes that `huggingface_hub` asks when it fetches something.

A repository has commits, refs that point to them, and a mood, by which the hub answers or refuses.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", "tokenizer.json")
"""Endings of files kept by LFS, as on the hub, whose digest is that of the bytes, and not of a Git blob."""
TOKEN = "hf_ours"

Mood = Literal["open", "gated", "private", "damaged", "short", "busy"]


@dataclass
class Repository:
    """Commits of a repository, the refs that name them, and the mood in which it is served."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    mood: Mood = "open"

    def commit(self, files: Mapping[str, bytes], *refs: str) -> str:
        """Add a commit, to which these refs point from now on; return its id."""
        digest = hashlib.sha1(usedforsecurity=False)
        for name, content in sorted(files.items()):
            digest.update(name.encode() + content)
        self.commits[digest.hexdigest()] = dict(files)
        self.refs |= dict.fromkeys(refs or ("main",), digest.hexdigest())
        return digest.hexdigest()


@dataclass
class Hub:
    """Repositories by their ids, and the requests so far: (method, path)."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def add(self, model_id: str, folder: Path, *, more: Mapping[str, bytes] | None = None) -> Repository:
        """Add a repository whose main branch holds the files of a folder, and `more`."""
        repository = self.repositories[model_id] = Repository()
        repository.commit({file.name: file.read_bytes() for file in folder.iterdir()} | dict(more or {}))
        return repository

    @property
    def fetched(self) -> list[str]:
        """Names of the files that were sent, in order."""
        return [path.rpartition("/")[2] for method, path in self.asked if method == "GET" and "/resolve/" in path]


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub on a free port of loopback, until the block ends."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def lfs_digest(content: bytes) -> str:
    """Return the digest by which LFS names a file."""
    return hashlib.sha256(content).hexdigest()


def git_digest(content: bytes) -> str:
    """Return the digest by which Git names a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: nobody reads the log."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        words = path.strip("/").split("/")
        if words[:2] in (["api", "models"], ["api", "datasets"]):
            words = words[2:]
        elif words[:1] == ["datasets"]:
            words = words[1:]
        if len(words) < 4:  # other things that the client asks a hub
            return self._refuse(404, "")
        model_id, verb, revision, name = "/".join(words[:2]), words[2], words[3], "/".join(words[4:])
        repository = self.hub.repositories.get(model_id)
        if repository is None:
            return self._refuse(404, "RepoNotFound")
        if refusal := self._refusal(repository.mood, verb):
            return self._refuse(*refusal)
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound")
        files = repository.commits[commit]
        if verb == "revision":
            siblings = [self._described(file, content) for file, content in files.items()]
            body = json.dumps({"id": model_id, "sha": commit, "siblings": siblings}).encode()
            return self._send(200, {"Content-Type": "application/json"}, body)
        if name not in files:
            return self._refuse(404, "EntryNotFound")
        return self._send_file(repository.mood, commit, name, files[name])

    def _refusal(self, mood: Mood, verb: str) -> tuple[int, str] | None:
        """Return a refusal, or None. The listing of a gated repository is open to all; its files are not."""
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if mood == "busy":
            return 503, ""
        if mood == "gated" and verb == "resolve" and not has_token:
            return 403, "GatedRepo"
        if mood == "private" and not has_token:
            return 401, "RepoNotFound"
        return None

    def _described(self, name: str, content: bytes) -> dict[str, object]:
        told: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git_digest(content)}
        if name.endswith(LARGE):
            told["lfs"] = {"size": len(content), "sha256": lfs_digest(content), "pointerSize": 134}
        return told

    def _send_file(self, mood: Mood, commit: str, name: str, content: bytes) -> None:
        digest = lfs_digest(content) if name.endswith(LARGE) else git_digest(content)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"'}
        if name.endswith(LARGE):
            headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            if mood == "damaged":
                content = content[:-1] + bytes([content[-1] ^ 1])
        cut = mood == "short" and name.endswith(".safetensors") and self.command == "GET"
        self._send(200, headers, content[:-7] if cut else content)

    def _refuse(self, status: int, code: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code} if code else {}
        self._send(status, headers, b"")

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
