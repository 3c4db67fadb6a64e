"""A kernel folder, and a loopback server that plays the Hub to the real client."""

import base64
import contextlib
import hashlib
import http.server
import json
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

MANIFEST = {
    "domain": "test",
    "name": "Negate",
    "typeConstraints": {"T": ["float32", "float16"]},
    "inputs": {"x": {"dtype": "T"}},
    "outputs": {"y": {"dtype": "T", "shape": "shapes.x"}},
    "derive": {"count": "numel(shapes.x)"},
    "variants": [
        {
            "id": "flat",
            "when": ["f16Ok(dtypes.T)"],
            "passes": [
                {
                    "shader": "negate.wgsl.jinja",
                    "bindings": ["x", "y"],
                    "dispatch": {"threads": "count", "workgroupSize": 64},
                }
            ],
        }
    ],
}
TEMPLATE = """\
{{ env.wgsl.resourceDeclarations }}

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) gid: vec3<u32>) {
  let index = gid.x + gid.y * {{ DISPATCH_FOLD_WIDTH * 64 }}u;
  if (index < {{ count }}u) {
    y[index] = -x[index];
  }
}
"""
NEGATE = {
    "manifest.json": json.dumps(MANIFEST).encode(),
    "negate.wgsl.jinja": TEMPLATE.encode(),
    "test.json": b'{"cases": []}',
}


def sha256(data: bytes) -> str:
    """As it stands in a `metadata.json`."""
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def with_metadata(files: dict[str, bytes], **changes: Any) -> dict[str, bytes]:
    """The files and their `metadata.json`, as the Hub's own tools write it."""
    digest = {"algorithm": "sha256", "files": {name: sha256(data) for name, data in files.items()}}
    metadata = {"name": "negate", "version": 1, "digest": digest} | changes
    return {**files, "metadata.json": json.dumps(metadata).encode()}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """A folder with these files."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@dataclass
class Repository:
    """One on the server; a test may change any of it at any time."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method, and what was asked for: a file's name, or `refs`."""
    tokens: set[str | None] = field(default_factory=set)
    error: tuple[int, *tuple[str, ...]] | None = None
    """What every request is answered with: a status, the Hub's code for the error, its message."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes to give in place of a file's own, to HEAD and to GET."""
    cut: dict[str, int] = field(default_factory=dict)
    """After how many bytes each connection for a file breaks."""
    short: dict[str, int] = field(default_factory=dict)
    """How many bytes GET gives of a file, in place of all that HEAD promised."""
    next: str = ""
    """The commit that version 1 moves on to, once its metadata was sent."""
    redirected: bool = False
    """Whether files stand behind a redirect, as on the Hub itself."""

    def publish(self, files: dict[str, bytes], branch: str = "v1") -> str:
        """Commits files to a branch; the new commit."""
        content = sorted({**files, "": branch.encode()}.items())
        commit = hashlib.sha1(repr(content).encode()).hexdigest()
        self.commits[commit] = {f"build/webgpu/{name}": data for name, data in files.items()}
        self.branches[branch] = commit
        return commit

    def asked(self, method: str) -> Counter[str]:
        """How often each file was asked for since the last time."""
        found = Counter(name for each, name in self.requests if each == method)
        self.requests = [each for each in self.requests if each[0] != method]
        return found


class FakeHub(http.server.ThreadingHTTPServer):
    """The Hub, on a port of this machine's loopback interface."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=partial(self.serve_forever, 0.05), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        path = unquote(self.path)
        if path.startswith("/api/kernels/"):
            owner, name, rest = path.removeprefix("/api/kernels/").split("/", 2)
        else:
            owner, name, rest = path.removeprefix("/kernels/").split("/", 2)
        repository = self.server.repositories.get(f"{owner}/{name}")
        if repository is None:  # to strangers the Hub says that they may not know
            return self.answer(401, "RepoNotFound")
        repository.tokens.add(self.headers["authorization"])
        if rest == "refs":
            repository.requests.append((self.command, "refs"))
            refs = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
                for name, commit in repository.branches.items()
            ]
            return self.answer(200, data=json.dumps({"branches": refs, "converts": [], "tags": []}))
        kind, revision, file = rest.split("/", 2)
        if kind == "resolve":
            repository.requests.append((self.command, file.removeprefix("build/webgpu/")))
        if repository.error:
            return self.answer(*repository.error)
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return self.answer(404, "RevisionNotFound")
        if file not in repository.commits[commit]:
            return self.answer(404, "EntryNotFound", **{"X-Repo-Commit": commit})
        if repository.redirected and kind == "resolve":
            return self.answer(307, Location=f"/api/kernels/{owner}/{name}/cache/{commit}/{file}")
        return self.file(repository, commit, file)

    do_GET = do_HEAD

    def file(self, repository: Repository, commit: str, name: str) -> None:
        data = repository.commits[commit][name]
        etag = hashlib.sha1(data).hexdigest()
        name = name.removeprefix("build/webgpu/")
        size = repository.sizes.get(name, len(data))
        start = int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if self.command == "GET" and name == "metadata.json" and repository.next:
            repository.branches["v1"] = repository.next
        if self.command == "GET" and name in repository.short:
            data = data[: repository.short[name]]
            size = len(data)
        if self.command == "GET" and name in repository.cut:
            data = data[: repository.cut[name]]
        self.answer(
            206 if "range" in self.headers else 200,
            data=data[start:],
            ETag=f'"{etag}"',
            **{"X-Repo-Commit": commit, "Content-Length": str(size - start)},
        )

    def answer(
        self,
        status: int,
        error: str = "",
        message: str = "",
        data: bytes | str = b"",
        **headers: str,
    ) -> None:
        if isinstance(data, str):
            data = data.encode()
        headers = {"Content-Length": str(len(data)), "Connection": "close"} | headers
        headers |= {"X-Error-Code": error, "X-Error-Message": message} if status >= 400 else {}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


def _without_waits() -> None:
    """The client waits longer and longer before it asks again."""
    time.sleep = lambda seconds: None


@contextlib.contextmanager
def process(hub_url: str, home: Path, **environment: str) -> Iterator[Callable[..., Any]]:
    """Calls functions in a process with a Hub, a cache and other variables for the real client.

    It reads them when it is imported. What a function raises is raised here, with the whole text
    of its causes as its cause.
    """
    variables = {
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        **environment,
    }
    others = ["HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"]
    with pytest.MonkeyPatch.context() as patch:
        for name in others:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, spawn, initializer=_without_waits)
        pool.submit(int).result(timeout=120)  # the process starts here, with these variables
    with pool:
        yield lambda f, *args, **kwargs: pool.submit(f, *args, **kwargs).result(timeout=120)
