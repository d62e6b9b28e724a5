"""Folders of five families as they are published, each with what its original classes make of texts and dialogues.

ChatGLM3 and Baichuan2 have their real vocabularies, from the folder of golden files. InternLM2, the first Baichuan and
the first Qwen have small ones, trained here. The originals are sentencepiece and tiktoken themselves.
"""

from __future__ import annotations

import base64
import io
import json
import re
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tiktoken._educational import bpe_train

from data.chat.native.families import PATTERN
from data.chat.native.kinds import native_tokenizer
from data.errors import DataError
from data.sample_set import IGNORED
from data.tokenized.tokenizer import load_tokenizer
from tests.conftest import FAQ, SHARED

CONTROL = 3  # type of a piece
CONTROLS = {"<unk>": 0, "<s>": 1, "</s>": 2}
# By family: what tokenizer_config.json calls the class, and the ids that end an answer.
CLASSES = {"internlm2": "InternLM2Tokenizer", "baichuan": "BaiChuanTokenizer", "qwen": "QWenTokenizer"}
CLASSES |= {"chatglm3": "ChatGLMTokenizer", "baichuan2": "BaichuanTokenizer"}
END_TOKENS = {
    "internlm2": [2, 13],
    "baichuan": [2],
    "qwen": [600, 602],
    "chatglm3": [2, 64795, 64797],
    "baichuan2": [2],
}
GOLDEN = ("chatglm3", "baichuan2")
ROLES = {"user": 195, "assistant": 196}  # of Baichuan
SPARE = [f"[UNUSED_TOKEN_{number}]" for number in range(1, 13)]  # 3 to 14
ADDED = {"<|plugin|>": 9, "<|interpreter|>": 10, "<|action_end|>": 11, "<|action_start|>": 12, "<|im_end|>": 13}
ADDED["<|im_start|>"] = 14
MARKUP = ["\n", "\t", "<td>", "<td/>", "<h1>", *(f"<spare_{number}>" for number in range(85))]
RESERVED = [*MARKUP, *(f"<reserved_{number}>" for number in range(110))]  # the 102nd is 195, as in the real one
RANKS = 600
EXTRAS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))]
CODE = "raise SystemExit('remote code was run')"

Pieces = list[tuple[list[int], bool]]  # token ids, and whether the model has to write them


def write(path: Path, settings: Any) -> None:
    path.write_text(json.dumps(settings), encoding="utf-8")


def refusal(folder: Path) -> str:
    """The line with which a folder's tokenizer is refused."""
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flat(pieces: Pieces) -> dict[str, list[int]]:
    """A sample of these pieces."""
    ids = [token for tokens, _ in pieces for token in tokens]
    labels = [token if supervised else IGNORED for tokens, supervised in pieces for token in tokens]
    return {"input_ids": ids, "labels": labels}


@cache
def golden() -> dict[str, Any]:
    path = SHARED / "golden" / "tokenizers" / "vectors.json"
    if not path.is_file():
        pytest.skip(f"no {path}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@cache
def sentencepiece_model(*user_defined: str, **changes: Any) -> bytes:
    """A tokenizer.model trained on the FAQ, with pieces for most of its characters."""
    model = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 1000,
        "byte_fallback": True,
        "character_coverage": 0.98,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "minloglevel": 2,
    }
    SentencePieceTrainer.train(
        sentence_iterator=iter(FAQ.read_text(encoding="utf-8").splitlines()),
        model_writer=model,
        user_defined_symbols=[*user_defined],
        **settings | changes,
    )
    return model.getvalue()


@cache
def ranks() -> dict[bytes, int]:
    """Byte pairs of the FAQ, and of characters that begin alike: some are no whole characters."""
    text = FAQ.read_text(encoding="utf-8")[:4000] + 3 * " ".join(map(chr, range(0x4E00, 0x4E80)))
    found: dict[bytes, int] = bpe_train(text, RANKS, PATTERN, visualise=None)
    assert b"\xe4\xb8" in found
    return found


def rank_file() -> bytes:
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks().items())


def decoder(names: dict[str, int]) -> dict[str, Any]:
    """The control tokens as tokenizer_config.json has them."""
    return {str(number): {"content": name, "normalized": False, "special": True} for name, number in names.items()}


class Published:
    """A family's folder, the tokenizer that is built of it, and the original.

    Args:
        dummy_prefix: of the sentencepiece model; as published where absent.
        settings: more for tokenizer_config.json.
    """

    def __init__(self, family: str, folder: Path, dummy_prefix: bool | None = None, **settings: Any) -> None:
        self.family, self.folder = family, folder
        self.vocabulary = folder / ("qwen.tiktoken" if family == "qwen" else "tokenizer.model")
        self.names = dict(CONTROLS)  # control tokens, and their ids
        self.beginning: list[int] = []  # of a text
        stated: dict[str, Any] = {"tokenizer_class": CLASSES[family]}
        if family == "qwen":
            content = rank_file()
            self.names = {name: number for number, name in enumerate(EXTRAS, start=RANKS)}
            encoding = tiktoken.Encoding("qwen", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens=self.names)
            self.bare: Callable[[str], list[int]] = encoding.encode_ordinary
        elif family in GOLDEN:
            about = golden()["tokenizers"][family]
            self.names = about.get("special_token_ids", self.names)
            self.beginning = about.get("orig_prefix", [])
            content = (SHARED / "golden" / "tokenizers" / family / "tokenizer.model").read_bytes()
            self.bare = SentencePieceProcessor(model_proto=content).encode
        else:
            if family == "internlm2":
                self.beginning, self.names = [1], CONTROLS | ADDED
                stated["added_tokens_decoder"] = decoder(self.names)
            spare, prefixed = (
                (SPARE, bool(dummy_prefix)) if family == "internlm2" else (RESERVED, dummy_prefix is not False)
            )
            content = sentencepiece_model(*spare, add_dummy_prefix=prefixed)
            proto = ModelProto.FromString(content)
            for name, number in self.names.items():
                proto.pieces[number].piece = name
                proto.pieces[number].type = CONTROL if number else proto.pieces[number].type
            self.bare = SentencePieceProcessor(model_proto=proto.SerializeToString()).encode
        self.end = END_TOKENS[family][-1]
        module = f"tokenization_{family}"
        stated["auto_map"] = {"AutoTokenizer": [f"{module}.{CLASSES[family]}", None]}
        write(folder / "tokenizer_config.json", stated | settings)
        (folder / f"{module}.py").write_text(CODE, encoding="utf-8")
        self.vocabulary.write_bytes(content)
        built = native_tokenizer(folder)
        assert built is not None
        self.tokenizer = built

    def original(self, text: str) -> list[int]:
        """What the family's class makes of a text, but for what it begins with."""
        if self.family == "chatglm3":  # no text can write its control tokens
            return self.bare(text)
        ids: list[int] = []
        text = unicodedata.normalize("NFC", text) if self.family == "qwen" else text
        for part in re.split(f"({'|'.join(map(re.escape, self.names))})", text):
            ids += [self.names[part]] if part in self.names else self.bare(part)
        return ids

    def chat(self, messages: list[dict[str, str]]) -> Pieces:
        """What the family's chat code makes of a dialogue."""
        pieces: Pieces = [(self.beginning, False)]
        if self.family == "qwen" and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
        for message in messages:
            answered, content = message["role"] == "assistant", message["content"]
            # The token of the next role ends a turn of ChatGLM3.
            pieces.append((self.asked(message["role"]), self.family == "chatglm3" and pieces[-1][1]))
            if self.family == "chatglm3":
                pieces.append((self.bare("\n") + self.bare(content), answered))
            elif self.family.startswith("baichuan"):
                pieces.append((self.original(content) + [self.end] * answered, answered))
            else:
                pieces += [([*self.original(content), self.end], answered), (self.bare("\n"), False)]
        return pieces

    def asked(self, role: str = "assistant") -> list[int]:
        """What stands before what somebody says."""
        if self.family == "chatglm3":
            return [self.names[f"<|{role}|>"]]
        if self.family.startswith("baichuan"):
            return [ROLES[role]] if role in ROLES else []
        return [self.names["<|im_start|>"], *self.bare(f"{role}\n")]
