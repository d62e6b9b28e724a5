"""The tokenizers of InternLM2, the first Baichuan and the first Qwen against sentencepiece and tiktoken."""

from __future__ import annotations

import json
import unicodedata
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer

from data.chat.native.kinds import end_tokens, export_tokenizer, native_tokenizer
from data.errors import DataError
from data.inspection.inspect import show_samples
from data.tokenized.recipe import tokenizer_digest
from data.tokenized.tokenize import encode, load_tokenizer
from tests.conftest import FAQ
from tests.data.helpers import chat
from tests.data.published_tokenizers import (
    CLASSES,
    CONTROLS,
    END_TOKENS,
    EXTRAS,
    MARKUP,
    RESERVED,
    SPARE,
    Published,
    decoder,
    rank_file,
    sentencepiece_model,
)
from tests.data.test_native_tokenizers import flat, write

FAMILIES = list(CLASSES)
VARIANTS = [*((family, None) for family in FAMILIES), ("internlm2", True), ("baichuan", False)]
ODD = [
    "",
    " ",
    "\n",
    "\r\n",
    "\t",
    "   ",
    "雪",
    "，",
    "丁七",
    "🤗",
    "é",
    "e\u0301",
    "Å",
    "ﬁ",
    "½",
    "\x00",
    "\u200b",
    "가",
]
WORDS = ["we'll", "I'M", "'ſ", "don't", "12345", "３", "x=y;", "C++", "--help", "▁", "<s", "</td>", "[UNUSED_TOKEN_"]
NAMES = ["<|im_end|>", "</s>", *EXTRAS[:4], *SPARE[4:8], *MARKUP[:6], *RESERVED[90:96], *RESERVED[190:196]]
FRAGMENTS = [*ODD, *WORDS, *NAMES, *FAQ.read_text(encoding="utf-8")[:900].split(" ")]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join) | st.text(max_size=12)
MESSAGES = [
    {"role": "user", "content": "What is [UNUSED_TOKEN_12], <reserved_5>?  两个 空格"},
    {"role": "assistant", "content": "A spare piece 🤗.\n\n\tNothing else."},
    {"role": "user", "content": "<td>丁七"},
    {"role": "assistant", "content": "Twice 2 is 4, 是的"},
]


def made(family: str, folder: Path, **changes: Any) -> Published:
    folder.mkdir(exist_ok=True)
    return Published(family, folder, **changes)


@pytest.fixture(scope="module", params=FAMILIES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("family", "dummy_prefix"), VARIANTS)
def test_ids_and_text_are_those_of_the_original(
    family: str, dummy_prefix: bool | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    each = Published(family, tmp_path_factory.mktemp(family), dummy_prefix)
    prefixed = dummy_prefix or (family == "baichuan" and dummy_prefix is None)
    pieces = {name for name in (*RESERVED, *SPARE) if len(name) > 1} if prefixed else set()

    def check(text: str) -> None:
        parts = [text] if family == "qwen" else text.replace("</s>", "<s>").replace("<|im_end|>", "<s>").split("<s>")
        if any(part in pieces or part.startswith(tuple(RESERVED[192:194])) for part in parts) and prefixed:
            return  # see test_a_dummy_prefix_is_left_out_where_a_chat_begins
        ids = each.tokenizer(text)["input_ids"]
        assert ids == each.beginning + each.original(text)
        assert ids == each.beginning + each.tokenizer(text, add_special_tokens=False)["input_ids"]
        if family == "qwen":
            assert each.tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
        elif not any(name in text for name in (*CONTROLS, "<|im_end|>", *EXTRAS)):
            assert each.tokenizer.decode(ids, skip_special_tokens=True) == text.replace("▁", " ")

    for fragment in FRAGMENTS:
        check(fragment)
        check(f"a {fragment}\n{fragment}")
    settings(max_examples=300)(given(TEXTS)(check))()


def test_a_dummy_prefix_is_left_out_where_a_chat_begins(tmp_path: Path) -> None:
    """As the original, which builds its chats from ids; in the middle of a text nothing stands before such pieces."""
    each = Published("baichuan", tmp_path)
    ids = each.tokenizer("<reserved_102> Hello<reserved_103> 雪</s><reserved_102>")["input_ids"]
    assert ids == [195, *each.bare("Hello"), 196, *each.bare("雪"), 2, 195]
    assert each.bare("<reserved_102>")[0] != 195
    assert each.tokenizer("a<reserved_102>b<td>c")["input_ids"] == each.bare("a<reserved_102>b<td>c")
    assert each.tokenizer("<td>c")["input_ids"] == each.bare("<td>c")


def test_offsets_cover_the_text(published: Published) -> None:
    text = "philosophy \n\n  def f(x):\n\treturn '雪🤗' <reserved_5>[UNUSED_TOKEN_2]<|im_end|> é"
    encoding = published.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    covered = 0
    for start, end in encoding["offset_mapping"]:
        assert start <= covered
        covered = max(covered, end)
    assert covered == len(text)


def test_control_tokens_are_those_of_the_original(published: Published) -> None:
    tokenizer, names = published.tokenizer, published.names
    for name, number in names.items():
        assert tokenizer(f"a{name}b", add_special_tokens=False)["input_ids"].count(number) == 1
        assert tokenizer.decode([number]) == name
        assert tokenizer.decode([number], skip_special_tokens=True) == ""
    end = "<|endoftext|>" if published.family == "qwen" else "</s>"
    pad = {"internlm2": "</s>", "baichuan": "<unk>", "qwen": end}[published.family]
    assert (tokenizer.eos_token, tokenizer.pad_token) == (end, pad)
    assert end_tokens(tokenizer) == set(END_TOKENS[published.family])
    if published.family == "internlm2":  # the names that the pieces had are text, those of other pieces are not
        ids = tokenizer("[UNUSED_TOKEN_12][UNUSED_TOKEN_1]", add_special_tokens=False)["input_ids"]
        assert 14 not in ids and ids[-1] == 3 and len(ids) > 3


@pytest.mark.parametrize("length", [1, 3])
def test_chat_prompts_are_those_of_the_original(published: Published, length: int) -> None:
    expected = [*flat(published.chat(MESSAGES[:length]))[0], *published.asked()]
    template = published.tokenizer.apply_chat_template
    assert template(MESSAGES[:length], add_generation_prompt=True)["input_ids"] == expected
    system = [{"role": "system", "content": "Be brief."}, *MESSAGES[:length]]
    if published.family == "baichuan":
        with pytest.raises(Exception, match="unexpected role system"):
            template(system)
    else:
        ids = template(system, add_generation_prompt=True)["input_ids"]
        assert ids == [*flat(published.chat(system))[0], *published.asked()]


def test_training_samples_supervise_the_answers_and_their_ends(published: Published) -> None:
    asks, answers = [[each["content"] for each in MESSAGES if each["role"] == role] for role in ("user", "assistant")]
    instruct = {"type": "instruct", "instruct": asks[0], "output": answers[0]}
    rounds = [["ask", asks[0]], ["ans", answers[0]], ["ask", asks[1]], ["ans", answers[1]]]
    for record, length in ((instruct, 2), ({"type": "conversation", "rounds": rounds}, 4)):
        ids, labels = flat(published.chat(MESSAGES[:length]))
        assert encode(record, published.tokenizer, 1000) == {"input_ids": ids, "labels": labels}
        assert labels.count(published.end) == length // 2
    text = "雪 falls.\n\n  The end."
    ids, labels = flat(
        [(published.beginning, False), ([*published.original(text), END_TOKENS[published.family][0]], True)]
    )
    assert encode({"type": "pretrain", "text": text}, published.tokenizer, 1000) == {"input_ids": ids, "labels": labels}


def test_a_system_message_that_the_first_baichuan_does_not_know_stands_in_the_question(tmp_path: Path) -> None:
    each = Published("baichuan", tmp_path)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}, MESSAGES[1]]
    found = encode(chat(said), each.tokenizer, 1000)
    expected = flat(each.chat([{"role": "user", "content": "Be brief.\n\nWhy?"}, MESSAGES[1]]))
    assert (found["input_ids"], found["labels"]) == expected


def test_samples_are_shown(published: Published) -> None:
    sample = encode({"type": "instruct", "instruct": "Why?", "output": "雪 falls."}, published.tokenizer, 1000)
    printed = StringIO()
    show_samples([sample], published.tokenizer, Console(file=printed, width=200))
    end = {"baichuan": "</s>"}.get(published.family, "<|im_end|>")
    blank = " " if published.family == "baichuan" else ""
    assert f"⟦{blank}雪 falls.{end}⟧" in printed.getvalue()


def test_an_export_loads_everywhere_with_the_same_ids(published: Published, tmp_path: Path) -> None:
    (tmp_path / published.vocabulary.name).write_bytes(b"copied")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5, "top_k": 7}')
    export_tokenizer(published.folder, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "eos_token_id": sorted({5, *END_TOKENS[published.family]}),
        "top_k": 7,
    }
    assert not list(tmp_path.glob("*.py")) and not (tmp_path / published.vocabulary.name).exists()
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in (
        "",
        " a\n\n b",
        "<td>雪<|im_end|>12 [UNUSED_TOKEN_2]</s> x",
        "e\u0301 丁 don't",
        *NAMES,
        "x ".join(NAMES),
    ):
        assert loaded(text)["input_ids"] == published.tokenizer(text)["input_ids"], text
    prompts = [each.apply_chat_template(MESSAGES) for each in (loaded, published.tokenizer)]
    assert prompts[0]["input_ids"] == prompts[1]["input_ids"]
    assert end_tokens(loaded) == end_tokens(published.tokenizer)
    assert native_tokenizer(tmp_path) is None


def test_no_vocabulary_no_export(published: Published, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "tokenizer_config.json").write_bytes((published.folder / "tokenizer_config.json").read_bytes())
    export_tokenizer(source, target)
    assert not list(target.iterdir())


def test_what_the_folder_says_counts(published: Published, tmp_path: Path) -> None:
    folder = made(published.family, tmp_path / "stated", chat_template="{{ 'a' }}", add_bos_token=True).folder
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    end = "<|im_end|>" if published.family != "baichuan" else "<unk>"
    write(folder / "tokenizer_config.json", stated | {"eos_token": {"content": end}, "pad_token": None})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "a"
    assert tokenizer.eos_token == end and tokenizer.pad_token == published.tokenizer.pad_token
    if published.family != "qwen":  # which has no beginning
        assert tokenizer("a")["input_ids"][0] == 1
    (folder / "chat_template.jinja").write_text("{{ 'b' }}")
    assert load_tokenizer(folder).apply_chat_template(MESSAGES, tokenize=False) == "b"


def test_no_template_without_the_pieces_of_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(*SPARE, add_dummy_prefix=False))
    for model_type in ("internlm2", "baichuan"):
        write(tmp_path / "config.json", {"model_type": model_type, "vocab_size": 64_000})
        tokenizer = native_tokenizer(tmp_path)
        assert tokenizer is not None and tokenizer.chat_template is None
        assert end_tokens(tokenizer) == {2}


def test_tokens_that_somebody_added_follow_the_pieces(tmp_path: Path) -> None:
    added = decoder(CONTROLS | {"<|im_end|>": 13, "<think>": 1000, "<note>": 1001})
    each = Published("internlm2", tmp_path, added_tokens_decoder=added)
    assert each.tokenizer("<think>a<note>", add_special_tokens=False)["input_ids"] == [1000, *each.bare("a"), 1001]


def told(folder: Path) -> str:
    with pytest.raises(DataError) as refused:
        load_tokenizer(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_missing_or_damaged_vocabulary_is_told_in_one_line(published: Published, tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"model_type": published.family})
    path = tmp_path / published.vocabulary.name
    assert told(tmp_path) == f"{path}: not found; expected the vocabulary that the checkpoint ships"
    whole = published.vocabulary.read_bytes()
    lines = whole.splitlines(keepends=True)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:e7dc\nsize 1018370\n"
    damaged = [b"", pointer, whole[: len(whole) // 3], whole[:-1]]
    if published.family == "qwen":
        orders = [
            lines[:400] + lines[399:],
            [*lines[:300], lines[301], lines[300], *lines[302:]],
            lines[:9] + lines[10:],
        ]
        damaged += [b"".join(each) for each in (*orders, lines[:200])]
        damaged += [whole.replace(b" 300\n", end) for end in (b" x\n", b"\n", b" 3 00\n", b" 301\n")]
        damaged += [b"\xff\xfe" + whole, whole.replace(lines[450][:3], b"?!?", 1)]
    for content in damaged:
        path.write_bytes(content)
        assert told(tmp_path).startswith((f"{path}: damaged, or ", f"{path}: sentencepiece cannot read it; "))
    path.write_bytes(whole)
    assert load_tokenizer(tmp_path) is not None  # config.json alone says which family it is


def test_lines_that_are_lost_at_the_end_are_told_by_the_end_of_sequence(tmp_path: Path) -> None:
    each = Published("qwen", tmp_path)
    lines = each.vocabulary.read_bytes().splitlines(keepends=True)
    for stated, kept, fits in ((600, 600, True), ([602, 600], 600, True), (600, 590, False), ([600], 590, False)):
        write(tmp_path / "generation_config.json", {"eos_token_id": stated})
        each.vocabulary.write_bytes(b"".join(lines[:kept]))
        if fits:
            assert native_tokenizer(tmp_path) is not None
        else:
            expected = f"has other ids than generation_config.json (eos_token_id {stated}); fetch it again"
            assert told(tmp_path) == f"{each.vocabulary}: {expected}"


@pytest.mark.parametrize(
    ("family", "stated", "expected"),
    [
        ("qwen", {"extra_vocab_file": "more.tiktoken"}, "extra_vocab_file (more.tiktoken) is not read"),
        ("qwen", {"eos_token": 5}, "no usable tokenizer: "),
        ("internlm2", {"eos_token": {"special": True}}, "no usable tokenizer: "),
        ("internlm2", {"added_tokens_decoder": [1]}, "added_tokens_decoder: expected "),
        ("internlm2", {"added_tokens_decoder": {"x": {"content": "<a>"}}}, "added_tokens_decoder: expected "),
        ("internlm2", {"added_tokens_decoder": {"13": "<a>"}}, "added_tokens_decoder: expected "),
        (
            "internlm2",
            {"added_tokens_decoder": decoder({"<a>": 1000, "<b>": 1005})},
            "has no room for the ids [1005] of ",
        ),
    ],
)
def test_settings_that_do_not_fit_are_told(family: str, stated: Any, expected: str, tmp_path: Path) -> None:
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": CLASSES[family]} | stated)
    (tmp_path / "qwen.tiktoken").write_bytes(rank_file())
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(*SPARE, add_dummy_prefix=False))
    assert expected in told(tmp_path)


@pytest.mark.parametrize("changes", [{"remove_extra_whitespaces": True}, {"normalization_rule_name": "nfkc"}])
def test_a_model_that_changes_its_text_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_model(*SPARE, **changes))
    assert SentencePieceProcessor(model_file=str(path)).encode("  Ａ ") != []
    write(tmp_path / "config.json", {"model_type": "internlm2"})
    assert told(tmp_path).startswith(f"{path}: replaces characters or leaves blanks out; ")


def test_other_ranks_are_another_tokenizer_to_the_cache(tmp_path: Path) -> None:
    digests = set()
    for content in (b"", rank_file(), b"x"):
        (tmp_path / "qwen.tiktoken").write_bytes(content)
        digests.add(tokenizer_digest(tmp_path))
    assert len(digests) == 3
