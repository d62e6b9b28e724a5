"""Whatever file of a folder its tokenizer is made of counts in the key of the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils import hub

from data.errors import DataError
from data.tokenized.recipe import tokenizer_digest
from data.tokenized.tokenize import VOCABULARIES, load_tokenizer

SETTINGS = {"tokenizer_class": "TokenizersBackend", "eos_token": "</s>"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """What transformers looks for in a folder."""
    seen: set[str] = set()
    look = hub.cached_files

    def noted(**options: Any) -> Any:
        seen.update(options["filenames"])
        return look(**options)

    monkeypatch.setattr(hub, "cached_files", noted)
    yield seen


@pytest.mark.parametrize("vocabulary", ["tokenizer.json", "tekken.json"])
def test_a_file_that_transformers_looks_for_changes_the_digest(
    vocabulary: str, tmp_path: Path, asked: set[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    (tmp_path / vocabulary).write_bytes(b"{}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("")
    with pytest.raises(DataError):  # none of these vocabularies has any words
        load_tokenizer(tmp_path)
    assert {vocabulary, "tokenizer_config.json", "chat_template.jinja"} <= asked
    assert "additional_chat_templates/tool_use.jinja" in asked
    assert [name for name in sorted(asked) if not _counts(tmp_path / name, tmp_path)] == []


@pytest.mark.parametrize("pattern", VOCABULARIES)
def test_every_vocabulary_that_is_taken_counts(pattern: str, tmp_path: Path) -> None:
    assert _counts(tmp_path / pattern.replace("*", "x"), tmp_path)


def test_what_else_lies_in_a_models_folder_does_not_count(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.safetensors.index.json", "generation_config.json", "README.md"):
        assert not _counts(tmp_path / name, tmp_path)


def test_another_template_for_tools_is_another_tokenizer(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Where transformers looks for one: not in `chat_templates`."""
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(tmp_path)
    path = tmp_path / hub.CHAT_TEMPLATE_DIR / "tool_use.jinja"
    path.parent.mkdir()
    for text in ("one", "two"):
        path.write_text(text)
        assert load_tokenizer(tmp_path).get_chat_template(tools=[{}]) == text
        assert _counts(path, tmp_path)


def _counts(path: Path, folder: Path) -> bool:
    """Whether the digest changes with a file."""
    before = tokenizer_digest(folder)
    path.write_bytes((path.read_bytes() if path.is_file() else b"") + b" ")
    return tokenizer_digest(folder) != before
