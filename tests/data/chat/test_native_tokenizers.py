"""The tokenizers that Pipetune rebuilds, against sentencepiece, tiktoken and the ids of the original classes."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.chat.native.families import MARK
from data.chat.native.kinds import end_tokens, export_tokenizer, native_tokenizer
from data.tokenized.tokenize import encode
from data.tokenized.tokenizer import load_tokenizer
from tests.cases import tiered
from tests.conftest import FAQ
from tests.data.helpers import chat
from tests.data.published_tokenizers import (
    CLASSES,
    CONTROLS,
    END_TOKENS,
    EXTRAS,
    GOLDEN,
    MARKUP,
    RESERVED,
    SPARE,
    Published,
    decoder,
    flat,
    golden,
    rank_file,
    refusal,
    sentencepiece_model,
    write,
)

VARIANTS = [("internlm2", None), ("internlm2", True), ("baichuan", None), ("baichuan", False), ("qwen", None)]
ODD = ["", " ", "\n", "\r\n", "\t", "   ", "雪", "，", "丁七", "🤗", "é", "e\u0301", "Å", "ﬁ", "½"]
ODD += ["\x00", "\u200b", "가"]
WORDS = ["we'll", "I'M", "'ſ", "don't", "12345", "３", "x=y;", "C++", "--help", "▁", "<s", "</td>", "[UNUSED_TOKEN_"]
NAMES = ["<|im_end|>", "</s>", *EXTRAS[:4], *SPARE[4:8], *MARKUP[:6], *RESERVED[90:96], *RESERVED[190:196]]
FRAGMENTS = [*ODD, *WORDS, *NAMES, *FAQ.read_text(encoding="utf-8")[:900].split(" ")]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join) | st.text(max_size=12)
MESSAGES = [
    {"role": "user", "content": "What is [UNUSED_TOKEN_12], <reserved_5>, <|user|>, sop?  两个 空格"},
    {"role": "assistant", "content": "A spare piece 🤗.\n\n\tNothing else."},
    {"role": "user", "content": "<td>丁七"},
    {"role": "assistant", "content": "Twice 2 is 4, 是的"},
]


@pytest.fixture(scope="module", params=CLASSES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(request.param, tmp_path_factory.mktemp(request.param))


def check_offsets(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Every character lies in a token, and no token begins before the end of another."""
    covered = 0
    for start, end in tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]:
        assert start <= covered, text
        covered = max(covered, end)
    assert covered == len(text)


@pytest.mark.parametrize("published", GOLDEN, indirect=True)
def test_golden_texts_have_the_ids_of_the_original_classes(published: Published) -> None:
    tokenizer = published.tokenizer
    for row in golden()["vectors"]:
        text, ids = row["text"], row[published.family]
        assert tokenizer(text)["input_ids"] == ids["orig"], text
        bare = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
        assert bare["input_ids"] == ids["sp"], text
        check_offsets(tokenizer, text)
        for number, (token, (start, end)) in enumerate(zip(bare["input_ids"], bare["offset_mapping"], strict=True)):
            piece = str(tokenizer.convert_ids_to_tokens(token))
            if not piece.startswith("<0x") and (number or published.family == "baichuan2"):  # no dummy prefix
                assert piece == text[start:end].replace(" ", "▁"), (text, number)
        assert tokenizer.decode(ids["sp"]) == (expected := text.replace("▁", " "))
        if ids["orig"][-len(ids["sp"]) :] == ids["sp"]:
            assert tokenizer.decode(ids["orig"], skip_special_tokens=True) == expected


@pytest.mark.parametrize(("family", "dummy_prefix"), VARIANTS)
def test_any_text_has_the_ids_of_the_original(
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
    check_offsets(each.tokenizer, "philosophy \n\n  f(x):\n\treturn '雪🤗' <reserved_5>[UNUSED_TOKEN_2]<|im_end|> é")


def test_a_dummy_prefix_is_left_out_where_a_chat_begins(tmp_path: Path) -> None:
    """As the original, which builds its chats from ids; in the middle of a text nothing stands before such pieces."""
    each = Published("baichuan", tmp_path)
    ids = each.tokenizer("<reserved_102> Hello<reserved_103> 雪</s><reserved_102>")["input_ids"]
    assert ids == [195, *each.bare("Hello"), 196, *each.bare("雪"), 2, 195]
    assert each.bare("<reserved_102>")[0] != 195
    assert each.tokenizer("a<reserved_102>b<td>c")["input_ids"] == each.bare("a<reserved_102>b<td>c")
    assert each.tokenizer("<td>c")["input_ids"] == each.bare("<td>c")


def test_control_tokens_are_those_of_the_original(published: Published) -> None:
    tokenizer, family = published.tokenizer, published.family
    for name, number in published.names.items():
        written = name + MARK * (family == "chatglm3")
        assert tokenizer(f"a{written}b", add_special_tokens=False)["input_ids"].count(number) == 1
        assert tokenizer.decode([number]) == name
        assert tokenizer.decode([number], skip_special_tokens=True) == ""
    end, pad = {"internlm2": (2, 2), "qwen": (600, 600)}.get(family, (2, 0))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (end, pad)
    assert end_tokens(tokenizer) == set(END_TOKENS[family])
    if family == "internlm2":  # the names that the pieces had are text, those of other pieces are not
        ids = tokenizer("[UNUSED_TOKEN_12][UNUSED_TOKEN_1]", add_special_tokens=False)["input_ids"]
        assert 14 not in ids and ids[-1] == 3 and len(ids) > 3


@pytest.mark.parametrize("length", [1, 2, 3])
def test_chat_prompts_are_those_of_the_original(published: Published, length: int) -> None:
    def check(messages: list[dict[str, str]]) -> None:
        expected = [*flat(published.chat(messages))["input_ids"], *published.asked()]
        assert template(messages, add_generation_prompt=True)["input_ids"] == expected

    template = published.tokenizer.apply_chat_template
    check(MESSAGES[:length])
    system = [{"role": "system", "content": "Be brief. 简短。"}, *MESSAGES[:length]]
    if published.family == "baichuan":
        with pytest.raises(Exception, match="unexpected role system"):
            template(system)
    else:
        check(system)


def test_samples_train_the_answers_and_their_ends(published: Published) -> None:
    tokenizer, end = published.tokenizer, END_TOKENS[published.family][0]
    (ask, answer), (ask_2, answer_2) = ([each["content"] for each in MESSAGES[n : n + 2]] for n in (0, 2))
    instruct = {"type": "instruct", "instruct": ask, "output": answer}
    rounds = [["ask", ask], ["ans", answer], ["ask", ask_2], ["ans", answer_2]]
    last = [([end], True)] if published.family == "chatglm3" else []
    for record, length in ((instruct, 2), ({"type": "conversation", "rounds": rounds}, 4)):
        assert encode(record, tokenizer, 1000) == flat(published.chat(MESSAGES[:length]) + last)
    text = "雪 falls.\n\n  </ s> The end."
    expected = flat([(published.beginning, False), ([*published.original(text), end], True)])
    assert encode({"type": "pretrain", "text": text}, tokenizer, 1000) == expected


def test_a_system_message_that_the_first_baichuan_does_not_know_stands_in_the_question(tmp_path: Path) -> None:
    each = Published("baichuan", tmp_path)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}, MESSAGES[1]]
    expected = flat(each.chat([{"role": "user", "content": "Be brief.\n\nWhy?"}, MESSAGES[1]]))
    assert encode(chat(said), each.tokenizer, 1000) == expected


@pytest.mark.parametrize("published", tiered(CLASSES, slow=["baichuan2", "chatglm3"]), indirect=True)
def test_an_export_loads_everywhere_with_the_same_ids(published: Published, tmp_path: Path) -> None:
    tokenizer, vocabulary = published.tokenizer, tmp_path / published.vocabulary.name
    export_tokenizer(published.folder, tmp_path)
    assert not list(tmp_path.glob("*.py")) and not vocabulary.exists()
    vocabulary.write_bytes(b"copied")
    write(tmp_path / "generation_config.json", {"eos_token_id": 5, "top_k": 7})
    export_tokenizer(published.folder, tmp_path)
    assert not vocabulary.exists()
    stated = json.loads((tmp_path / "generation_config.json").read_text())
    assert stated == {"eos_token_id": sorted({5, *END_TOKENS[published.family]}), "top_k": 7}
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    texts = ["", " a\n\n b", "<td>雪<|im_end|>12 [UNUSED_TOKEN_2]</s> x", "e\u0301 丁 don't", *NAMES, "x ".join(NAMES)]
    texts += [row["text"] for row in golden()["vectors"]] if published.family in GOLDEN else []
    for text in texts:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"], text
    prompts = [each.apply_chat_template(MESSAGES) for each in (loaded, tokenizer)]
    assert prompts[0]["input_ids"] == prompts[1]["input_ids"]
    assert end_tokens(loaded) == end_tokens(tokenizer)
    assert native_tokenizer(tmp_path) is None  # transformers reads a tokenizer.json
    (source := tmp_path / "no vocabulary").mkdir()
    (target := tmp_path / "target").mkdir()
    write(source / "tokenizer_config.json", {"tokenizer_class": CLASSES[published.family]})
    export_tokenizer(source, target)
    assert not list(target.iterdir())


@pytest.mark.parametrize("published", tiered(CLASSES, slow=["baichuan2", "chatglm3"]), indirect=True)
def test_the_folders_settings_count(published: Published, tmp_path: Path) -> None:
    end = {"internlm2": "<|im_end|>", "qwen": "<|im_end|>"}.get(published.family, "<unk>")
    changes: dict[str, Any] = {
        "eos_token": {"content": end},
        "pad_token": None,
        "chat_template": "{{ 'a' }}",
        "add_bos_token": True,
    }
    folder = Published(published.family, tmp_path, **changes).folder
    tokenizer, fixed = load_tokenizer(folder), published.family == "chatglm3"  # whose template no folder can write
    assert tokenizer.pad_token == published.tokenizer.pad_token
    assert (tokenizer.eos_token == end) is not fixed
    assert (tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "a") is not fixed
    if published.family not in ("qwen", "chatglm3"):  # which have none of their own
        assert tokenizer("a")["input_ids"][0] == 1
    (folder / "chat_template.jinja").write_text("{{ 'b' }}")
    assert (load_tokenizer(folder).apply_chat_template(MESSAGES, tokenize=False) == "b") is not fixed


def test_a_vocabulary_without_the_pieces_of_a_template_has_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(*SPARE, add_dummy_prefix=False))
    for model_type in ("internlm2", "baichuan"):
        write(tmp_path / "config.json", {"model_type": model_type, "vocab_size": 64_000})
        tokenizer = native_tokenizer(tmp_path)
        assert tokenizer is not None and tokenizer.chat_template is None
        assert end_tokens(tokenizer) == {2}


def test_added_tokens_follow_the_pieces(tmp_path: Path) -> None:
    added = decoder(CONTROLS | {"<|im_end|>": 13, "<think>": 1000, "<note>": 1001})
    each = Published("internlm2", tmp_path, added_tokens_decoder=added)
    assert each.tokenizer("<think>a<note>", add_special_tokens=False)["input_ids"] == [1000, *each.bare("a"), 1001]


def test_a_missing_or_damaged_vocabulary_is_refused(published: Published, tmp_path: Path) -> None:
    family = {"chatglm3": "chatglm", "baichuan2": "baichuan"}.get(published.family, published.family)
    write(tmp_path / "config.json", {"model_type": family})
    path = tmp_path / published.vocabulary.name
    assert refusal(tmp_path) == f"{path}: not found; expected the vocabulary that the checkpoint ships"
    whole = published.vocabulary.read_bytes()
    lines = whole.splitlines(keepends=True)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:e7dc\nsize 1018370\n"
    damaged = [b"", pointer, whole[: len(whole) // 3], whole[:-1]]
    if published.family == "qwen":
        orders = [lines[:400] + lines[399:], [*lines[:300], lines[301], lines[300], *lines[302:]], lines[:200]]
        damaged += [b"".join(each) for each in (*orders, lines[:9] + lines[10:])]
        damaged += [whole.replace(b" 300\n", end) for end in (b" x\n", b"\n", b" 3 00\n", b" 301\n")]
        damaged += [b"\xff\xfe" + whole, whole.replace(lines[450][:3], b"?!?", 1)]
    elif published.family in GOLDEN:
        damaged += [whole.replace("▁the".encode(), "▁and".encode(), 1), whole.replace(b"<0x41>", b"<\xff\xff41>")]
    for content in damaged:
        path.write_bytes(content)
        assert refusal(tmp_path).startswith((f"{path}: damaged, or ", f"{path}: sentencepiece cannot read it; "))
    path.write_bytes(whole)
    assert load_tokenizer(tmp_path) is not None  # config.json alone says which family it is


def test_a_vocabulary_that_lost_its_last_lines_is_refused(tmp_path: Path) -> None:
    """The ids of control tokens behind them are no longer those of generation_config.json."""
    each = Published("qwen", tmp_path)
    lines = each.vocabulary.read_bytes().splitlines(keepends=True)
    for stated, kept, fits in ((600, 600, True), ([602, 600], 600, True), (600, 590, False), ([600], 590, False)):
        write(tmp_path / "generation_config.json", {"eos_token_id": stated})
        each.vocabulary.write_bytes(b"".join(lines[:kept]))
        if fits:
            assert native_tokenizer(tmp_path) is not None
        else:
            expected = f"has other ids than generation_config.json (eos_token_id {stated}); fetch it again"
            assert refusal(tmp_path) == f"{each.vocabulary}: {expected}"


@pytest.mark.parametrize(
    ("family", "stated", "expected"),
    [
        ("qwen", {"extra_vocab_file": "more.tiktoken"}, "extra_vocab_file (more.tiktoken) is not read"),
        ("qwen", {"eos_token": 5}, "no usable tokenizer: "),
        ("internlm2", {"eos_token": {"special": True}}, "no usable tokenizer: "),
        ("internlm2", {"added_tokens_decoder": {"13": "<a>"}}, "added_tokens_decoder: expected "),
        ("internlm2", {"added_tokens_decoder": decoder({"<a>": 1000, "<b>": 1005})}, "has no room for the ids [1005]"),
    ],
)
def test_settings_that_do_not_fit_are_refused(family: str, stated: Any, expected: str, tmp_path: Path) -> None:
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": CLASSES[family]} | stated)
    (tmp_path / "qwen.tiktoken").write_bytes(rank_file())
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(*SPARE, add_dummy_prefix=False))
    assert expected in refusal(tmp_path)


def test_folders_of_other_families_are_left_to_transformers(tmp_path: Path) -> None:
    assert native_tokenizer(tmp_path) is None
    for content in ('{"model_type": "llama"}', "{}", '{"model_type": "chatglm"}'):
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
        write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "ChatGLM4Tokenizer"} if "glm" in content else {})
        assert native_tokenizer(tmp_path) is None


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
def test_a_folder_without_a_usable_vocabulary_is_refused(model_type: str, tmp_path: Path) -> None:
    """transformers gives a tokenizer without words for some families, and passes over files that are not whole."""
    write(tmp_path / "config.json", {"model_type": model_type})
    assert refusal(tmp_path).startswith(f"{tmp_path}: no usable tokenizer: expected one of the files tokenizer.json, ")
    if model_type != "llama":
        (tmp_path / "vocab.txt").touch()
        assert refusal(tmp_path).startswith(f"{tmp_path}: no usable tokenizer: it has no words")
    (tmp_path / "tokenizer.model").touch()
    assert refusal(tmp_path).startswith(f"{tmp_path / 'tokenizer.model'}: sentencepiece cannot read it; fetch it again")
