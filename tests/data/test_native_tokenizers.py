"""The rebuilt tokenizers of ChatGLM3 and Baichuan2 against sentencepiece and the ids of the original classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.chat.native.chatglm3 import MARK
from data.chat.native.kinds import native_tokenizer
from data.errors import DataError
from data.sample_set import IGNORED
from data.tokenized.tokenize import encode, load_tokenizer

CLASSES = {"chatglm3": "ChatGLMTokenizer", "baichuan2": "BaichuanTokenizer"}
FAMILIES = list(CLASSES)
MESSAGES = [
    {"role": "system", "content": "Answer briefly. 简短。"},
    {"role": "user", "content": "philosophy <|user|> [gMASK]sop\n\n  def f(x):\n\treturn x"},
    {"role": "assistant", "content": " 好的 🤗\n"},
    {"role": "user", "content": "\nTwo\n lines "},
]
Pieces = list[tuple[list[int], bool]]


def write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings), encoding="utf-8")


class Kit:
    """A family's folder as it is published, its tokenizer, and sentencepiece on the same model."""

    def __init__(self, family: str, shared: Path, folder: Path) -> None:
        self.family = family
        self.folder = folder
        model = str(shutil.copy(shared / "golden" / "tokenizers" / family / "tokenizer.model", folder))
        module = "tokenization_" + CLASSES[family].removesuffix("Tokenizer").lower()
        auto_map = {"AutoTokenizer": [f"{module}.{CLASSES[family]}", None]}
        write(folder / "tokenizer_config.json", {"tokenizer_class": CLASSES[family], "auto_map": auto_map})
        (folder / f"{module}.py").write_text("raise SystemExit('remote code was run')", encoding="utf-8")
        self.sp = SentencePieceProcessor(model_file=model)
        built = native_tokenizer(folder)
        assert built is not None
        self.tokenizer: PreTrainedTokenizerFast = built
        golden = json.loads((shared / "golden" / "tokenizers" / "vectors.json").read_text(encoding="utf-8"))
        self.vectors: list[dict[str, Any]] = [{"text": row["text"], **row[family]} for row in golden["vectors"]]
        self.about: dict[str, Any] = golden["tokenizers"][family]

    def chat(self, messages: list[dict[str, str]]) -> Pieces:
        """The original's ids for a chat, message by message; whether the model has to write them."""
        if self.family == "chatglm3":  # build_chat_input and the loss mask of the published fine-tuning
            roles = self.about["special_token_ids"]
            pieces: Pieces = [([64790, 64792], False)]
            for message in messages:
                answered = message["role"] == "assistant"
                after_answer = len(pieces) > 1 and pieces[-1][1]
                pieces.append(([roles[f"<|{message['role']}|>"]], after_answer))
                pieces.append((self.sp.encode("\n") + self.sp.encode(message["content"]), answered))
            return pieces
        pieces = []  # generation_utils.build_chat_input, and </s> after each answer
        for message in messages:
            role = {"system": [], "user": [195], "assistant": [196]}[message["role"]]
            answered = message["role"] == "assistant"
            pieces += [(role, False), (self.sp.encode(message["content"]) + [2] * answered, answered)]
        return pieces


def flat(pieces: Pieces) -> tuple[list[int], list[int]]:
    ids = [token for tokens, _ in pieces for token in tokens]
    return ids, [token if supervised else IGNORED for tokens, supervised in pieces for token in tokens]


@pytest.fixture(scope="module", params=FAMILIES)
def kit(request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(request.param, shared, tmp_path_factory.mktemp(request.param))


def test_ids_equal_the_original_classes_and_sentencepiece_on_every_text(kit: Kit) -> None:
    for row in kit.vectors:
        assert kit.tokenizer(row["text"])["input_ids"] == row["orig"], row["text"]
        bare = kit.tokenizer(row["text"], add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert bare == row["sp"], row["text"]


def test_offsets_cover_the_text_and_each_piece_lies_where_it_says(kit: Kit) -> None:
    for row in kit.vectors:
        text = row["text"]
        encoding = kit.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        covered = 0
        spans = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
        for number, (token, (start, end)) in enumerate(spans):
            assert start <= covered, (text, number)
            covered = max(covered, end)
            piece = str(kit.tokenizer.convert_ids_to_tokens(token))
            dummy_prefix = kit.family == "chatglm3" and number == 0
            if not piece.startswith("<0x") and not dummy_prefix:
                assert piece == text[start:end].replace(" ", "▁"), (text, number)
        assert covered == len(text)


def test_decoding_gives_the_text_back(kit: Kit) -> None:
    for row in kit.vectors:
        expected = row["text"].replace("▁", " ")  # sentencepiece's sign for a blank
        assert kit.tokenizer.decode(row["sp"]) == expected
        if row["orig"][-len(row["sp"]) :] == row["sp"]:
            assert kit.tokenizer.decode(row["orig"], skip_special_tokens=True) == expected


def test_control_tokens_have_the_published_ids(kit: Kit) -> None:
    tokenizer = kit.tokenizer
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0, 0)
    names = kit.about.get("special_token_ids", {"<s>": 1, "<reserved_106>": 195, "<reserved_107>": 196})
    for name, number in names.items():
        assert tokenizer.decode([number]) == name
        if kit.family == "chatglm3":
            assert tokenizer(name + MARK, add_special_tokens=False)["input_ids"] == [number]
    if kit.family == "chatglm3":
        assert [tokenizer.user_token_id, tokenizer.observation_token_id] == [64795, 64797]


@pytest.mark.parametrize("kit", ["baichuan2"], indirect=True)
def test_begin_of_sequence_of_baichuan2_is_the_folders_choice(kit: Kit, tmp_path: Path) -> None:
    shutil.copy(kit.folder / "tokenizer.model", tmp_path)
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": CLASSES["baichuan2"], "add_bos_token": True})
    tokenizer = native_tokenizer(tmp_path)
    assert tokenizer is not None
    for row in kit.vectors:
        assert tokenizer(row["text"], split_special_tokens=True)["input_ids"] == row["orig_ctor"]


@pytest.mark.parametrize("messages", [MESSAGES[1:2], MESSAGES[:2], MESSAGES, MESSAGES[1:]])
def test_chat_prompts_equal_those_the_original_builds_from_ids(kit: Kit, messages: list[dict[str, str]]) -> None:
    expected, _ = flat(kit.chat(messages))
    expected.append(64796 if kit.family == "chatglm3" else 196)
    assert kit.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == expected
    with pytest.raises(Exception, match="role critic"):
        kit.tokenizer.apply_chat_template([{"role": "critic", "content": "no"}])


def test_training_samples_supervise_the_answers_and_their_ends(kit: Kit) -> None:
    end: Pieces = [([2], True)] if kit.family == "chatglm3" else []
    asks, answers = ["What is <|user|>, sop?", "再来一次？"], ["People, <|assistant|> and 人。", " Twice 🤗. "]
    says = [("user", asks[0]), ("assistant", answers[0]), ("user", asks[1]), ("assistant", answers[1])]
    messages = [{"role": role, "content": content} for role, content in says]
    instruct = {"type": "instruct", "instruct": asks[0], "output": answers[0]}
    rounds = [["ask", asks[0]], ["ans", answers[0]], ["ask", asks[1]], ["ans", answers[1]]]
    conversation = {"type": "conversation", "rounds": rounds}
    for record, length in ((instruct, 2), (conversation, 4)):
        ids, labels = flat(kit.chat(messages[:length]) + end)
        assert encode(record, kit.tokenizer, 1000) == {"input_ids": ids, "labels": labels}
    text = "雪 falls.\n\n</ s> The end."
    beginning = [64790, 64792] if kit.family == "chatglm3" else []
    ids, labels = flat([(beginning, False), ([*kit.sp.encode(text), 2], True)])
    assert encode({"type": "pretrain", "text": text}, kit.tokenizer, 1000) == {"input_ids": ids, "labels": labels}


def test_saved_tokenizer_loads_everywhere_with_the_same_ids(kit: Kit, tmp_path: Path) -> None:
    kit.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert all(loaded(row["text"])["input_ids"] == row["orig"] for row in kit.vectors)
    prompts = [each.apply_chat_template(MESSAGES, add_generation_prompt=True) for each in (loaded, kit.tokenizer)]
    assert prompts[0]["input_ids"] == prompts[1]["input_ids"]
    assert (loaded.eos_token_id, loaded.pad_token_id) == (2, 0)
    assert native_tokenizer(tmp_path) is None  # transformers reads a tokenizer.json


def test_a_missing_or_damaged_model_is_told_in_one_line(kit: Kit, tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"model_type": {"chatglm3": "chatglm", "baichuan2": "baichuan"}[kit.family]})
    path = tmp_path / "tokenizer.model"
    with pytest.raises(DataError, match=r"tokenizer.model: not found") as missing:
        native_tokenizer(tmp_path)
    whole = (kit.folder / "tokenizer.model").read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:e7dc\nsize 1018370\n"
    twice = whole.replace("▁the".encode(), "▁and".encode(), 1)
    no_text = whole.replace(b"<0x41>", b"<\xff\xff41>")
    for damaged in (b"", pointer, whole[: len(whole) // 2], whole[:-1], twice, no_text):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged, or no sentencepiece BPE") as refused:
            native_tokenizer(tmp_path)
        assert all("\n" not in str(caught.value) for caught in (missing, refused))
    path.write_bytes(whole)
    assert native_tokenizer(tmp_path) is not None  # config.json alone says which family it is


def test_folders_of_other_families_are_left_to_transformers(tmp_path: Path) -> None:
    assert native_tokenizer(tmp_path) is None
    for content in ('{"model_type": "llama"}', "{}", '{"model_type": "chatglm"}'):
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
        stated = {"tokenizer_class": "ChatGLM4Tokenizer"} if "chatglm" in content else {}
        write(tmp_path / "tokenizer_config.json", stated)
        assert native_tokenizer(tmp_path) is None


FAMILY_NAMES = "llama bloom qwen2 qwen3 qwen3_moe mistral mixtral gemma2 gemma3_text phi3 olmo2 glm glm4".split()


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_a_folder_without_a_tokenizer_is_refused(model_type: str, tmp_path: Path) -> None:
    """transformers gives a tokenizer without words for some of them."""
    write(tmp_path / "config.json", {"model_type": model_type})
    with pytest.raises(DataError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: no usable tokenizer: expected one of the files tokenizer.json, ")


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("file", ["tokenizer.model", "vocab.txt"])
def test_a_tokenizer_without_words_is_refused(model_type: str, file: str, tmp_path: Path) -> None:
    """transformers passes over a file that was not fetched whole, or that is none of the family's."""
    write(tmp_path / "config.json", {"model_type": model_type})
    (tmp_path / file).touch()
    with pytest.raises(DataError) as caught:
        load_tokenizer(tmp_path)
    (line,) = str(caught.value).splitlines()
    damaged = f"{tmp_path / file}: sentencepiece cannot read it; fetch it again"
    no_words = f"{tmp_path}: no usable tokenizer: it has no words"
    assert line.startswith(damaged if file == "tokenizer.model" else no_words)
