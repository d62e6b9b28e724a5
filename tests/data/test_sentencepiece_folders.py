"""Folders with a sentencepiece model and no tokenizer.json: the model's own ids, or a line that says why not."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data.chat.chat_template import chat_template
from data.chat.native.kinds import export_tokenizer
from data.chat.prompts import Prompts
from data.errors import DataError
from data.tokenized.tokenize import load_tokenizer
from training.checkpoint.side_files import read_side_files

LINES = ["The  end of the museum", "    def f():", "        return 1", "the hen then  there", "a  b   c    d"] * 40
TEXTS = [
    "",
    "hi",
    "The  end",
    "    indent",
    "def f():\n    return 1\n",
    "\t\ta   b ",
    "天地 🙂 é",
    "  ",
    "the\n\n   hen",
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def folder_of(tmp_path: Path, settings: dict[str, Any] | None, **options: Any) -> Path:
    """A llama folder with a small sentencepiece model."""
    made = io.BytesIO()
    wanted: dict[str, Any] = {
        "model_type": "bpe",
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
        "vocab_size": 320,
    }
    wanted |= {"normalization_rule_name": "identity", "allow_whitespace_only_pieces": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=made, hard_vocab_limit=False, **wanted | options
    )
    (tmp_path / "tokenizer.model").write_bytes(made.getvalue())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        None,
        {"tokenizer_class": "LlamaTokenizer"} | TOKENS,
        {"tokenizer_class": "LLaMATokenizer"} | dict.fromkeys(TOKENS, ""),
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False} | TOKENS,
    ],
)
def test_the_ids_are_those_of_sentencepiece(tmp_path: Path, settings: dict[str, Any] | None, prefix: bool) -> None:
    folder = folder_of(tmp_path, settings, add_dummy_prefix=prefix)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    begin = [1] if (settings or {}).get("add_bos_token", True) else []
    tokenizer = load_tokenizer(folder)
    target = tmp_path / "exported"
    target.mkdir()
    (target / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    export_tokenizer(folder, target)
    assert (target / "tokenizer.model").is_file()
    theirs, plain = AutoTokenizer.from_pretrained(target), Tokenizer.from_file(str(target / "tokenizer.json"))
    for text in TEXTS:
        expected = model.encode(text)
        assert tokenizer.encode(text) == begin + expected, text
        assert theirs.encode(text) == begin + expected, text
        assert plain.encode(text, add_special_tokens=False).ids == expected, text


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc"},
        {"byte_fallback": False, "vocab_size": 60},
    ],
)
def test_a_model_that_cannot_be_rebuilt_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.model: "):
        load_tokenizer(folder_of(tmp_path, {"tokenizer_class": "LlamaTokenizer"} | TOKENS, **options))


def test_added_tokens_keep_their_ids(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"tokenizer_class": "LlamaTokenizer"} | TOKENS)
    size = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).get_piece_size()
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": size}))
    assert load_tokenizer(folder).convert_tokens_to_ids("<pad>") == size


def test_named_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    named = [{"name": name, "template": "{{ messages }}"} for name in ("rag", "tool_use")]
    folder = folder_of(tmp_path, {"tokenizer_class": "LlamaTokenizer", "chat_template": named} | TOKENS)
    with pytest.raises(DataError, match=r"rag, tool_use and no default.*prompt_format: FILE"):
        chat_template(load_tokenizer(folder), Prompts())


@pytest.mark.parametrize("exported", [False, True])
def test_a_template_of_an_older_file_is_read(tmp_path: Path, exported: bool) -> None:
    folder = folder_of(tmp_path, {"tokenizer_class": "LlamaTokenizer"} | TOKENS)
    if exported:
        load_tokenizer(folder).save_pretrained(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(folder).chat_template == "{{ messages }}"


def test_a_published_vocabulary(shared: Path, tmp_path: Path) -> None:
    golden = shared / "golden" / "tokenizers"
    (tmp_path / "tokenizer.model").write_bytes((golden / "mixtral-v1" / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"} | TOKENS))
    tokenizer = load_tokenizer(tmp_path)
    for each in json.loads((golden / "vectors.json").read_text(encoding="utf-8"))["vectors"]:
        if not any(name in each["text"] for name in TOKENS.values()):  # these are control tokens in transformers
            assert tokenizer.encode(each["text"], add_special_tokens=False) == each["mixtral-v1"]["sp"], each["text"]


def test_a_run_hands_on_the_ids_that_it_trains(tmp_path: Path) -> None:
    """Of tokenizer.model alone, transformers 5 would make other ids in its checkpoints and exports."""
    folder = folder_of(tmp_path, {"tokenizer_class": "LlamaTokenizer"} | TOKENS)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    (saved := tmp_path / "saved").mkdir()
    for name, content in read_side_files(folder, ends=[2]).items():
        (saved / name).write_bytes(content)
    assert (saved / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()
    for loaded in (AutoTokenizer.from_pretrained(saved), load_tokenizer(saved)):
        assert [loaded.encode(text) for text in TEXTS] == [[1, *model.encode(text)] for text in TEXTS]
