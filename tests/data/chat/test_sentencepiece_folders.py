"""Folders with a sentencepiece model and no tokenizer.json: the model's own ids, or a line that says why not."""

from __future__ import annotations

import os
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data.chat.chat_template import chat_template
from data.chat.native.kinds import export_tokenizer
from data.chat.native.pieces import CONTROLS
from data.chat.prompts import Prompts
from data.errors import DataError
from data.tokenized.tokenizer import load_tokenizer
from tests.cases import tiered
from tests.conftest import SHARED
from tests.data.published_tokenizers import golden, refusal, sentencepiece_model, write
from training.checkpoint.side_files import read_side_files

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
LLAMA = {"tokenizer_class": "LlamaTokenizer"} | TOKENS
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:e7dc\nsize 1018370\n"


def folder_of(tmp_path: Path, settings: dict[str, Any] | None, *user_defined: str, **options: Any) -> Path:
    """A llama folder with a small sentencepiece model."""
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(*user_defined, **options))
    write(tmp_path / "config.json", {"model_type": "llama"})
    if settings is not None:
        write(tmp_path / "tokenizer_config.json", settings)
    return tmp_path


def original(folder: Path) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        None,
        {"tokenizer_class": "LLaMATokenizer"} | dict.fromkeys(TOKENS, ""),
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False} | TOKENS,
    ],
)
def test_the_ids_are_those_of_sentencepiece(tmp_path: Path, settings: dict[str, Any] | None, prefix: bool) -> None:
    folder = folder_of(tmp_path, settings, add_dummy_prefix=prefix)
    model, tokenizer = original(folder), load_tokenizer(folder)
    begin = [1] if (settings or {}).get("add_bos_token", True) else []
    (target := tmp_path / "exported").mkdir()
    (target / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    export_tokenizer(folder, target)
    assert (target / "tokenizer.model").is_file()
    theirs, plain = AutoTokenizer.from_pretrained(target), Tokenizer.from_file(str(target / "tokenizer.json"))
    for text in TEXTS:
        expected = model.encode(text)
        assert tokenizer.encode(text) == theirs.encode(text) == begin + expected, text
        assert plain.encode(text, add_special_tokens=False).ids == expected, text


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc"},
        {"byte_fallback": False},
    ],
)
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "InternLM2Tokenizer"])
def test_a_model_that_cannot_be_rebuilt_is_refused(
    tmp_path: Path, tokenizer_class: str, options: dict[str, Any]
) -> None:
    assert "tokenizer.model: " in refusal(folder_of(tmp_path, LLAMA | {"tokenizer_class": tokenizer_class}, **options))


def test_added_tokens_keep_their_ids(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LLAMA)
    size = original(folder).get_piece_size()
    write(folder / "added_tokens.json", {"<pad>": size})
    assert load_tokenizer(folder).convert_tokens_to_ids("<pad>") == size


def test_named_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    named = [{"name": name, "template": "{{ messages }}"} for name in ("rag", "tool_use")]
    folder = folder_of(tmp_path, LLAMA | {"chat_template": named})
    with pytest.raises(DataError, match=r"rag, tool_use and no default.*prompt_format: FILE"):
        chat_template(load_tokenizer(folder), Prompts())


@pytest.mark.parametrize("exported", [False, True])
def test_a_template_of_an_older_file_is_read(tmp_path: Path, exported: bool) -> None:
    folder = folder_of(tmp_path, LLAMA)
    if exported:
        load_tokenizer(folder).save_pretrained(folder)
    write(folder / "chat_template.json", {"chat_template": "{{ messages }}"})
    assert load_tokenizer(folder).chat_template == "{{ messages }}"


OWN = [
    *(" a", "a ", "  a  b  ", "\t\tif x:\n    \ty", "天地玄黄  宇宙", "👩\u200d🚀 🙂", "1234567 3.14", "\x00\x07\x1b"),
    *("a\r\nb\r\n", "مرحبا  بالعالم", "", "<s>[INST] hi [/INST] a</s><s>b", "a<unk> b</s>\n c", " <s>x", "<s>"),
]
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
    model, proto = original(path.parent), ModelProto.FromString(path.read_bytes())
    proto.normalizer_spec.add_dummy_prefix &= legacy
    inner = SentencePieceProcessor(model_proto=proto.SerializeToString())
    ids: list[int] = []
    for number, part in enumerate(re.split("(<unk>|<s>|</s>)", text)):
        ids += [CONTROLS.index(part)] if part in CONTROLS else (inner if number else model).encode(part)
    return ids


@pytest.mark.parametrize(
    ("layout", "name"),
    tiered(
        [*product(LAYOUTS, ["mixtral-v1"]), *product(["not legacy", "another class"], ["baichuan2", "chatglm3"])],
        quick=["as published-mixtral-v1", "legacy-mixtral-v1"],
    ),
)
def test_every_layout_has_the_published_ids_or_is_refused(tmp_path: Path, name: str, layout: str) -> None:
    vectors, path = golden()["vectors"], tmp_path / "tokenizer.model"
    path.write_bytes((SHARED / "golden" / "tokenizers" / name / "tokenizer.model").read_bytes())
    family, settings, refused = LAYOUTS[layout]
    for file, content in (("config", family and {"model_type": family}), ("tokenizer_config", settings)):
        if content is not None:
            write(tmp_path / f"{file}.json", content)
    if refused:
        refusal(tmp_path)
        return
    export_tokenizer(tmp_path, exported := tmp_path / "exported", native=False)
    settings = settings or {}
    begin, end = [1] * settings.get("add_bos_token", True), [2] * settings.get("add_eos_token", False)
    rows = [(each["text"], each[name]["sp"]) for each in vectors]
    cut = [text for text, _ in rows if any(control in text for control in CONTROLS)] + OWN
    rows = [row for row in rows if row[0] not in cut]
    rows += [(text, by_sentencepiece(path, text, settings.get("legacy", True))) for text in cut]
    for tokenizer in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(exported)):
        for text, expected in rows:
            assert tokenizer.encode(text) == begin + expected + end, text


GEMMA: dict[str, Any] = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "add_dummy_prefix": False}
GEMMA |= {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"}


@pytest.mark.parametrize("settings", [None, {}, {"add_bos_token": True}])
def test_a_folder_of_gemmas_kind_has_the_models_ids_or_is_refused(
    tmp_path: Path, settings: dict[str, Any] | None
) -> None:
    settings = settings and {"tokenizer_class": "GemmaTokenizer"} | settings
    folder = folder_of(tmp_path, settings, "\n\n", "▁▁", "▁▁▁▁", **GEMMA)
    if settings is None:  # config.json says that it is LLaMA's
        expected = "begins with <pad>, <eos>, <bos>, and the class .* with <unk>, <s>, </s>; "
        assert re.search(expected, refusal(folder))
    write(folder / "config.json", {"model_type": "gemma"})
    try:
        tokenizer = load_tokenizer(folder)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert [tokenizer.encode(text) for text in TEXTS] == [[2, *original(folder).encode(text)] for text in TEXTS]


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "GemmaTokenizer", "Other"])
def test_a_file_that_is_no_sentencepiece_model_is_refused(tmp_path: Path, tokenizer_class: str) -> None:
    path = folder_of(tmp_path, {"tokenizer_class": tokenizer_class} | TOKENS) / "tokenizer.model"
    whole = path.read_bytes()
    for content in (b"", whole[:-100], whole[: len(whole) // 2], POINTER, b"IQ== 0\nIg== 1\n"):
        path.write_bytes(content)
        assert re.search(r"tokenizer\.model: .*fetch", refusal(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_or_a_broken_link_is_refused(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, LLAMA)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for _ in range(2):
        assert f"{name}: a broken link or no regular file" in refusal(folder)
        (folder / name).unlink()
        (folder / name).symlink_to("gone")


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("tokenizer_config.json", [1], "tokenizer_config.json: damaged"),
        ("config.json", [1], "config.json: damaged"),
        ("chat_template.json", {"chat_template": 5}, "chat_template.json: expected"),
        ("chat_template.json", [], "chat_template.json: damaged"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template: expected a text"),
        ("tokenizer_config.json", {"model_max_length": "512"}, "model_max_length: expected a number"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder: expected"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"3": "a"}}, "added_tokens_decoder: expected"),
        ("added_tokens.json", [1], "added_tokens.json: damaged"),
        ("special_tokens_map.json", [1], "special_tokens_map.json: damaged"),
        ("tokenizer_config.json", {"add_bos_token": "false"}, "add_bos_token: expected true or false"),
        ("tokenizer_config.json", {"legacy": "false"}, "legacy: expected true or false"),
        ("tokenizer_config.json", {"add_prefix_space": False}, "tokenizer_config.json: add_prefix_space: "),
        (
            "tokenizer_config.json",
            {"legacy": False, "added_tokens_decoder": {"1000": {"content": "<e>", "rstrip": True}}},
            "'<e>' cannot take blanks in",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, file: str, content: Any, expected: str) -> None:
    folder = folder_of(tmp_path, {})
    write(folder / file, content)
    assert expected in refusal(folder)


def test_a_run_hands_on_the_ids_that_it_trains(tmp_path: Path) -> None:
    """Of tokenizer.model alone, transformers 5 would make other ids in its checkpoints and exports."""
    folder = folder_of(tmp_path, LLAMA)
    (saved := tmp_path / "saved").mkdir()
    no_weights: Any = None  # which alone ask for a spec
    for name, content in read_side_files(folder, no_weights, ends=[2]).items():
        (saved / name).write_bytes(content)
    assert (saved / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()
    for loaded in (AutoTokenizer.from_pretrained(saved), load_tokenizer(saved)):
        assert [loaded.encode(text) for text in TEXTS] == [[1, *original(folder).encode(text)] for text in TEXTS]
