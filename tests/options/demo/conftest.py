"""demo.py in the tests' own process, and models that write what a test knows."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AddedToken, AutoModelForCausalLM

import demo
from data.tokenized.tokenize import encode
from data.tokenized.tokenizer import load_tokenizer
from tests.data.template_styles import Style
from tests.models.conftest import make_case

__all__ = ["make_case"]

Make = Callable[..., Path]
RunDemo = Callable[..., tuple[int, str, str]]
WIDE: dict[str, Any] = {
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}  # so that a model does not repeat itself
END = "<|endoftext|>"  # a base model's end of sequence, whose template ends answers with <|im_end|>


@pytest.fixture
def run_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunDemo:
    """A function that runs demo.py here, with a model's folder or none: exit code, standard output, standard error."""

    def run(folder: Path | None, *words: str | Path, typed: str = "") -> tuple[int, str, str]:
        model = ["--model", str(folder)] if folder else []
        monkeypatch.setattr(sys, "argv", ["demo.py", *model, *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        capsys.readouterr()
        code: Any = 0
        try:
            demo.main()
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def folder(make_checkpoint: Make) -> Path:
    return make_checkpoint("llama", **WIDE)


@pytest.fixture
def recite(make_checkpoint: Make) -> Make:
    """A function that writes a model which answers anything with this text; all of its tokens are different."""

    def write(text: str, style: Style | None = None, end: str = END) -> Path:
        folder = make_checkpoint("llama", initializer_range=0.0, tie_word_embeddings=False, vocab_size=560)
        tokenizer = load_tokenizer(folder)
        tokenizer.add_tokens([AddedToken(END, special=True, normalized=False)])
        if style:
            style.put_on(tokenizer)
        tokenizer.eos_token = end
        tokenizer.save_pretrained(folder)
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], add_generation_prompt=True)
        ids = [prompt["input_ids"][-1], *tokenizer(text, add_special_tokens=False)["input_ids"]]
        make_recite(folder, ids, "model.embed_tokens", "lm_head")
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((folder / name).read_text(encoding="utf-8"))
            settings["eos_token_id"] = tokenizer.convert_tokens_to_ids(end)
            (folder / name).write_text(json.dumps(settings), encoding="utf-8")
        return folder

    return write


def make_recite(folder: Path, ids: Sequence[int], embedding: str, head: str) -> None:
    """Let each of these tokens predict the next, where the weights of a folder are zeros."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert len(set(ids)) == len(ids) <= tensors[f"{embedding}.weight"].shape[1]
    for number, (token, following) in enumerate(pairwise(ids)):
        tensors[f"{embedding}.weight"][token, number] = 1.0
        tensors[f"{head}.weight"][following, number] = 1.0
    save_file(tensors, path, metadata={"format": "pt"})


def memorize(folder: Path, record: Any) -> None:
    """Train a tiny model until it knows a record by heart."""
    sample = encode(record, load_tokenizer(folder), 1000)
    ids, labels = torch.tensor([sample["input_ids"]]), torch.tensor([sample["labels"]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        loss = model(ids, labels=labels).loss
        if loss < 0.01:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
