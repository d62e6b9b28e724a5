"""Shows that `download` takes weights and side files, and no code, from a hub (a small one on this machine)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from models.api import download
from tests.models.helpers import contents, copy_of, error_line, write_weights

NAME = "someone/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The three requests that a download makes: the list of files, the newest commit, each file."""

    folder: Path

    def do_GET(self) -> None:
        files = contents(self.folder)
        path = self.path.partition("?")[0]
        listing = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in files.items()]
        revision = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        if path in (f"/api/models/{NAME}/tree/main", f"/api/models/{NAME}/tree/{COMMIT}"):
            self.answer(json.dumps(listing).encode(), "application/json")
        elif path == f"/api/models/{NAME}/revision/main":
            self.answer(json.dumps(revision).encode(), "application/json")
        elif (name := path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")) in files:
            self.answer(files[name], "application/octet-stream")
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET  # noqa: N815 (the name that http.server looks for)

    def answer(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hash(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """What HF_ENDPOINT does, which the library reads only once."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def repository(llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What a repository holds: a model, code, and weights in other formats."""
    folder = copy_of(llama(), tmp_path / "repository")
    (folder / "modeling_llama.py").write_text("raise SystemExit")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubOfFolder", (Hub,), {"folder": folder}))
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    use_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    yield folder
    server.shutdown()
    server.server_close()


def fetched(folder: Path) -> dict[str, bytes]:
    """What a download left, but for the hub client's own notes."""
    return {name: data for name, data in contents(folder).items() if not name.startswith(".cache")}


def test_download_takes_weights_and_side_files_and_no_code(
    repository: Path, llama: Callable[..., Path], tmp_path: Path
) -> None:
    (repository / "pytorch_model-00001-of-00002.bin").write_bytes(b"the same weights, once more")
    (repository / "additional_chat_templates").mkdir()
    for name in ("tool_use.jinja", "of_tools.py"):
        (repository / "additional_chat_templates" / name).write_text("{{ tools }}")
    download(NAME, tmp_path / "model")
    assert fetched(tmp_path / "model") == contents(llama()) | {
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}"
    }


def test_download_takes_bin_files_where_there_is_nothing_else(repository: Path, tmp_path: Path) -> None:
    write_weights(repository, {"pytorch_model.bin": {}})
    (repository / "training_args.bin").write_bytes(b"a pickle")
    download(NAME, tmp_path / "model")
    assert "pytorch_model.bin" in fetched(tmp_path / "model")
    assert "training_args.bin" not in fetched(tmp_path / "model")


def test_an_unknown_model_and_an_unreachable_hub_are_errors_of_one_line(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "someone/else" in error_line(lambda: download("someone/else", tmp_path / "model"))
    use_hub(monkeypatch, "a-mirror-without-https")
    assert NAME in error_line(lambda: download(NAME, tmp_path / "model"))
