"""Whatever file of a folder its tokenizer is made of counts in the key of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils import hub

from data.errors import DataError
from data.tokenized.recipe import tokenizer_digest
from data.tokenized.tokenizer import VOCABULARIES, load_tokenizer
from tests.data.published_tokenizers import write


@pytest.mark.parametrize("vocabulary", ["tokenizer.json", "tekken.json"])
def test_a_file_that_transformers_looks_for_changes_the_digest(
    vocabulary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    look = hub.cached_files

    def noted(**options: Any) -> Any:
        asked.update(options["filenames"])
        return look(**options)

    monkeypatch.setattr(hub, "cached_files", noted)
    write(tmp_path / "config.json", {"model_type": "mistral"})
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "TokenizersBackend", "eos_token": "</s>"})
    (tmp_path / vocabulary).write_bytes(b"{}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("")
    with pytest.raises(DataError):  # none of these vocabularies has any words
        load_tokenizer(tmp_path)
    assert {vocabulary, "tokenizer_config.json", "chat_template.jinja"} <= asked
    assert "additional_chat_templates/tool_use.jinja" in asked
    assert [name for name in sorted(asked) if not counts(tmp_path / name)] == []


def test_every_vocabulary_that_is_taken_counts_and_nothing_else(tmp_path: Path) -> None:
    assert all(counts(tmp_path / pattern.replace("*", "x")) for pattern in VOCABULARIES)
    for name in ("model.safetensors", "model.safetensors.index.json", "generation_config.json", "README.md"):
        assert not counts(tmp_path / name)


def test_another_template_for_tools_is_another_tokenizer(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Where transformers looks for one: not in `chat_templates`."""
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(tmp_path)
    path = tmp_path / hub.CHAT_TEMPLATE_DIR / "tool_use.jinja"
    path.parent.mkdir()
    for text in ("one", "two"):
        path.write_text(text)
        assert load_tokenizer(tmp_path).get_chat_template(tools=[{}]) == text
        assert counts(path)


def counts(path: Path) -> bool:
    """Return whether the digest of the tokenizer in a folder changes with a file of it."""
    folder = path.parent.parent if path.parent.name == hub.CHAT_TEMPLATE_DIR else path.parent
    before = tokenizer_digest(folder)
    path.write_bytes((path.read_bytes() if path.is_file() else b"") + b" ")
    return tokenizer_digest(folder) != before
