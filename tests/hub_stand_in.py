"""A stand-in for the HuggingFace Hub on loopback: what its client asks of a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """Repositories by `models/ORG/NAME` or `datasets/ORG/NAME`: a commit, and the files that every commit has.

    Attributes:
        url: of the server.
        asked: paths of the requests, in order.
    """

    def __init__(self, repositories: dict[str, tuple[str, Mapping[str, bytes]]]) -> None:
        self.repositories = repositories
        self.asked: list[str] = []
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a path."""
        self.asked.append(path)
        path = path.partition("?")[0]
        for name, (head, files) in self.repositories.items():
            plain = name.removeprefix("models/")
            if path.startswith(f"/api/{name}/revision/") or path == f"/api/{name}":
                siblings = [{"rfilename": file} for file in files]
                return (
                    200,
                    {},
                    json.dumps({"id": plain.removeprefix("datasets/"), "sha": head, "siblings": siblings}).encode(),
                )
            if path.startswith(f"/api/{name}/tree/"):
                rows = [
                    {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for file, content in files.items()
                ]
                return 200, {}, json.dumps(rows).encode()
            if path.startswith(f"/{plain}/resolve/"):
                commit, _, file = path.removeprefix(f"/{plain}/resolve/").partition("/")
                if file in files:
                    etag = hashlib.sha1(files[file]).hexdigest()
                    return 200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, files[file]
        return 404, {"X-Error-Code": "RepoNotFound"}, b""


@contextmanager
def served(repositories: dict[str, tuple[str, Mapping[str, bytes]]]) -> Generator[Hub]:
    """Serve repositories within the block."""
    hub = Hub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(with_body=True)

        def do_HEAD(self) -> None:
            self._send(with_body=False)

        def _send(self, *, with_body: bool) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
