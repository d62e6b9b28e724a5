"""A small hub on this machine, which serves one folder, as a model or as a data set."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

NAME = "someone/something"
COMMIT, TAGGED = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"
REVISIONS = {"main": COMMIT, "v1": TAGGED}
KINDS = ("/api/models", "/api/datasets", "/datasets")


class Hub(BaseHTTPRequestHandler):
    """The three requests that a download makes: the commit of a revision, the files of a folder, each file."""

    folder: Path
    sent: list[str]  # the files whose content was sent

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        for kind in KINDS:
            path = path.removeprefix(kind)
        _, what, revision, *names = [*(path.removeprefix(f"/{NAME}") or "/revision/main").split("/"), "", ""]
        place = self.folder / "/".join(names).rstrip("/")
        self.commit = REVISIONS.get(revision, revision)
        if self.commit not in REVISIONS.values() or not place.exists():
            self.send_response(404)
            self.send_header(
                "X-Error-Code", "RepoNotFound" if self.commit not in REVISIONS.values() else "EntryNotFound"
            )
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif what == "revision":
            siblings = [{"rfilename": each["path"]} for each in self.listing(self.folder, "**/*")]
            self.answer(json.dumps({"id": NAME, "sha": self.commit, "siblings": siblings}).encode(), "application/json")
        elif what == "tree":
            found = self.listing(place, "*" if "recursive=false" in query else "**/*")
            self.answer(json.dumps(found).encode(), "application/json")
        else:
            if self.command == "GET":
                self.sent.append(place.name)
                time.sleep(0.3 * (place.suffix == ".safetensors"))  # so that others come while it is sent
            self.answer(place.read_bytes(), "application/octet-stream")

    do_HEAD = do_GET  # noqa: N815 (the name that http.server looks for)

    def listing(self, place: Path, pattern: str) -> list[dict[str, object]]:
        found = [(str(path.relative_to(self.folder)), path) for path in sorted(place.glob(pattern))]
        kinds = {True: "directory", False: "file"}
        return [
            {"type": kinds[path.is_dir()], "path": name, "size": path.stat().st_size, "oid": name}
            for name, path in found
        ]

    def answer(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hash(data)}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serving(folder: Path, sent: list[str]) -> Iterator[str]:
    """Serve a folder at the address that this gives; note the files that are sent."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubOfFolder", (Hub,), {"folder": folder, "sent": sent}))
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
