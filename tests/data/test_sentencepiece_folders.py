"""Folders with a sentencepiece model and no tokenizer.json: the model's own ids, or a line that says why not."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data.chat.chat_template import chat_template
from data.chat.native.kinds import export_tokenizer
from data.chat.native.pieces import CONTROLS
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


OWN = [
    *(" a", "a ", "  a  b  ", "\t\tif x:\n    \ty", "天地玄黄  宇宙", "👩\u200d🚀 🙂", "1234567 3.14", "\x00\x07\x1b"),
    *("a\r\nb\r\n", "مرحبا  بالعالم", "", "<s>[INST] hi [/INST] a</s><s>b", "a<unk> b</s>\n c", " <s>x", "<s>"),
]
LLAMA = {"tokenizer_class": "LlamaTokenizer"} | TOKENS
# config.json's family and tokenizer_config.json; whether it is refused.
LAYOUTS: dict[str, tuple[str | None, dict[str, Any] | None, bool]] = {
    "as published": ("llama", LLAMA, False),
    "no tokenizer_config.json": ("mistral", None, False),
    "no config.json": (None, LLAMA, False),
    "neither": (None, None, True),
    "internlm by its family": ("internlm", None, False),
    "internlm by its class": ("internlm", {"tokenizer_class": "InternLMTokenizer"}, False),
    "another class": ("llama", {"tokenizer_class": "XverseTokenizer"} | TOKENS, True),
    "of transformers 5": ("llama", {"tokenizer_class": "TokenizersBackend"} | TOKENS, True),
    "another family's class": ("llama", {"tokenizer_class": "GPT2Tokenizer"} | TOKENS, True),
    "gemma's class": ("gemma", {"tokenizer_class": "GemmaTokenizer"}, True),
    "legacy": ("llama", LLAMA | {"legacy": True}, False),
    "not legacy": ("llama", LLAMA | {"legacy": False}, False),
    "no <s>": ("mixtral", LLAMA | {"add_bos_token": False}, False),
    "</s>": ("mixtral", LLAMA | {"add_eos_token": True}, False),
}


def by_sentencepiece(path: Path, text: str, legacy: bool) -> list[int]:
    """The ids of a text whose control tokens are cut out; `legacy`: what stands behind one is a text of its own."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    proto = ModelProto.FromString(path.read_bytes())
    proto.normalizer_spec.add_dummy_prefix &= legacy
    inner = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    ids: list[int] = []
    for number, part in enumerate(re.split("(<unk>|<s>|</s>)", text)):
        ids += [CONTROLS.index(part)] if part in CONTROLS else (inner if number else model).encode(part)
    return ids


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *((layout, "mixtral-v1") for layout in LAYOUTS),
        *((layout, name) for layout in ("not legacy", "another class") for name in ("baichuan2", "chatglm3")),
    ],
)
def test_every_layout_has_the_published_ids_or_is_refused(shared: Path, tmp_path: Path, name: str, layout: str) -> None:
    golden = shared / "golden" / "tokenizers"
    path = tmp_path / "tokenizer.model"
    path.write_bytes((golden / name / "tokenizer.model").read_bytes())
    family, settings, refused = LAYOUTS[layout]
    for file, content in (("config", family and {"model_type": family}), ("tokenizer_config", settings)):
        if content is not None:
            (tmp_path / f"{file}.json").write_text(json.dumps(content))
    if refused:
        with pytest.raises(DataError) as caught:
            load_tokenizer(tmp_path)
        assert "\n" not in str(caught.value)
        return
    export_tokenizer(tmp_path, exported := tmp_path / "exported", native=False)
    settings = settings or {}
    begin, end = [1] * settings.get("add_bos_token", True), [2] * settings.get("add_eos_token", False)
    rows = [(each["text"], each[name]["sp"]) for each in json.loads((golden / "vectors.json").read_bytes())["vectors"]]
    cut = [text for text, _ in rows if any(control in text for control in CONTROLS)] + OWN
    rows = [row for row in rows if row[0] not in cut]
    rows += [(text, by_sentencepiece(path, text, settings.get("legacy", True))) for text in cut]
    for tokenizer in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(exported)):
        for text, expected in rows:
            assert tokenizer.encode(text) == begin + expected + end, text


@pytest.mark.parametrize("prefix", [True, False])
def test_a_prefix_that_the_model_has_otherwise_is_refused(tmp_path: Path, prefix: bool) -> None:
    folder = folder_of(tmp_path, LLAMA | {"add_prefix_space": not prefix}, add_dummy_prefix=prefix)
    with pytest.raises(DataError, match=r"tokenizer_config\.json: add_prefix_space: "):
        load_tokenizer(folder)
    folder_of(tmp_path, LLAMA | {"add_prefix_space": prefix}, add_dummy_prefix=prefix)
    load_tokenizer(folder)


GEMMA: dict[str, Any] = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "add_dummy_prefix": False}
GEMMA |= {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"}
GEMMA |= {"user_defined_symbols": ["\n\n", "▁▁", "▁▁▁▁"]}


def test_a_vocabulary_of_another_class_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="begins with <pad>, <eos>, <bos>, and the class .* with <unk>, <s>, </s>; "):
        load_tokenizer(folder_of(tmp_path, None, **GEMMA))


@pytest.mark.parametrize(
    "settings",
    [None, {}, {"add_bos_token": True}],
)
def test_a_folder_of_gemmas_kind_has_the_models_ids_or_is_refused(
    tmp_path: Path, settings: dict[str, Any] | None
) -> None:
    folder = folder_of(tmp_path, settings and {"tokenizer_class": "GemmaTokenizer"} | settings, **GEMMA)
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma"}))
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    try:
        tokenizer = load_tokenizer(folder)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert [tokenizer.encode(text) for text in TEXTS] == [[2, *model.encode(text)] for text in TEXTS]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:e7dc\nsize 1018370\n"


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "GemmaTokenizer", "InternLM2Tokenizer", "Other"])
def test_a_file_that_is_no_sentencepiece_model_is_refused(tmp_path: Path, tokenizer_class: str) -> None:
    folder = folder_of(tmp_path, {"tokenizer_class": tokenizer_class} | TOKENS)
    path = folder / "tokenizer.model"
    whole = path.read_bytes()
    for content in (b"", whole[:-100], whole[: len(whole) // 2], POINTER, b"IQ== 0\nIg== 1\n"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"tokenizer\.model: .*fetch") as caught:
            load_tokenizer(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_or_a_broken_link_is_refused(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, LLAMA)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for _ in range(2):
        with pytest.raises(DataError, match=rf"{name}: a broken link or no regular file"):
            load_tokenizer(folder)
        (folder / name).unlink()
        (folder / name).symlink_to("gone")


MALFORMED = {
    "a list": ("tokenizer_config.json", [1], "tokenizer_config.json: damaged"),
    "no config": ("config.json", [1], "config.json: damaged"),
    "no template": ("chat_template.json", {}, "chat_template.json: expected"),
    "a template of another kind": ("chat_template.json", {"chat_template": 5}, "chat_template.json: expected"),
    "a list of templates": ("chat_template.json", [], "chat_template.json: damaged"),
    "a number for a template": ("tokenizer_config.json", {"chat_template": 5}, "chat_template: expected a text"),
    "a length": ("tokenizer_config.json", {"model_max_length": "512"}, "model_max_length: expected a number"),
    "tokens": ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder: expected"),
    "a token": ("tokenizer_config.json", {"added_tokens_decoder": {"3": "a"}}, "added_tokens_decoder: expected"),
    "older tokens": ("added_tokens.json", [1], "added_tokens.json: damaged"),
    "special tokens": ("special_tokens_map.json", [1], "special_tokens_map.json: damaged"),
    "<s>": ("tokenizer_config.json", {"add_bos_token": "false"}, "add_bos_token: expected true or false"),
    "legacy": ("tokenizer_config.json", {"legacy": "false"}, "legacy: expected true or false"),
    "what strips": (
        "tokenizer_config.json",
        {"legacy": False, "added_tokens_decoder": {"320": {"content": "<e>", "rstrip": True}}},
        "'<e>' cannot take blanks in",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_settings_are_told_in_one_line(tmp_path: Path, name: str) -> None:
    file, content, expected = MALFORMED[name]
    folder = folder_of(tmp_path, {})
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_hands_on_the_ids_that_it_trains(tmp_path: Path) -> None:
    """Of tokenizer.model alone, transformers 5 would make other ids in its checkpoints and exports."""
    folder = folder_of(tmp_path, {"tokenizer_class": "LlamaTokenizer"} | TOKENS)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    (saved := tmp_path / "saved").mkdir()
    no_weights: Any = None  # which alone ask for a spec
    for name, content in read_side_files(folder, no_weights, ends=[2]).items():
        (saved / name).write_bytes(content)
    assert (saved / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()
    for loaded in (AutoTokenizer.from_pretrained(saved), load_tokenizer(saved)):
        assert [loaded.encode(text) for text in TEXTS] == [[1, *model.encode(text)] for text in TEXTS]
