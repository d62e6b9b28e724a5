"""Small vocabularies of InternLM2, the first Baichuan and the first Qwen, in folders as they are published.

Beside each stands what its own class makes of a text and its own chat code of a dialogue, by sentencepiece and
tiktoken themselves.
"""

from __future__ import annotations

import base64
import io
import re
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tiktoken
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tiktoken._educational import bpe_train

from data.chat.native.kinds import native_tokenizer
from data.chat.native.qwen import PATTERN
from tests.conftest import FAQ
from tests.data.test_native_tokenizers import Pieces, write

CONTROL = 3  # type of a piece
CONTROLS = {"<unk>": 0, "<s>": 1, "</s>": 2}
# By family: what tokenizer_config.json calls the class, and the ids that end an answer.
CLASSES = {"internlm2": "InternLM2Tokenizer", "baichuan": "BaiChuanTokenizer", "qwen": "QWenTokenizer"}
END_TOKENS = {"internlm2": [2, 13], "baichuan": [2], "qwen": [600, 602]}
SPARE = [f"[UNUSED_TOKEN_{number}]" for number in range(1, 13)]  # 3 to 14
ADDED = {"<|plugin|>": 9, "<|interpreter|>": 10, "<|action_end|>": 11, "<|action_start|>": 12, "<|im_end|>": 13}
ADDED["<|im_start|>"] = 14
MARKUP = ["\n", "\t", "<td>", "<td/>", "<h1>", *(f"<spare_{number}>" for number in range(85))]
RESERVED = [*MARKUP, *(f"<reserved_{number}>" for number in range(110))]  # the 102nd is 195, as in the real one
RANKS = 600
EXTRAS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))]


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
        self.beginning: list[int] = []  # of a text
        self.names = dict(CONTROLS)  # what the class cuts out of any text
        stated: dict[str, Any] = {"tokenizer_class": CLASSES[family]}
        if family == "qwen":
            self.vocabulary, content = folder / "qwen.tiktoken", rank_file()
            self.names = {name: number for number, name in enumerate(EXTRAS, start=RANKS)}
            encoding = tiktoken.Encoding("qwen", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens=self.names)
            self.bare: Callable[[str], list[int]] = encoding.encode_ordinary
        else:
            self.vocabulary = folder / "tokenizer.model"
            if family == "internlm2":
                self.beginning, self.names = [1], CONTROLS | ADDED
                stated["added_tokens_decoder"] = decoder(self.names)
                content = sentencepiece_model(*SPARE, add_dummy_prefix=bool(dummy_prefix))
            else:
                content = sentencepiece_model(*RESERVED, add_dummy_prefix=dummy_prefix is not False)
            proto = ModelProto.FromString(content)
            for name, number in self.names.items():
                proto.pieces[number].piece = name
                proto.pieces[number].type = CONTROL if number else proto.pieces[number].type
            processor = SentencePieceProcessor(model_proto=proto.SerializeToString())
            self.bare = processor.encode
        self.end = END_TOKENS[family][-1]
        module = f"tokenization_{family}"
        stated["auto_map"] = {"AutoTokenizer": [f"{module}.{CLASSES[family]}", None]}
        write(folder / "tokenizer_config.json", stated | settings)
        (folder / f"{module}.py").write_text("raise SystemExit('remote code was run')", encoding="utf-8")
        self.vocabulary.write_bytes(content)
        built = native_tokenizer(folder)
        assert built is not None
        self.tokenizer = built

    def original(self, text: str) -> list[int]:
        """What the family's class makes of a text, but for what it begins with."""
        ids: list[int] = []
        text = unicodedata.normalize("NFC", text) if self.family == "qwen" else text
        for part in re.split(f"({'|'.join(map(re.escape, self.names))})", text):
            ids += [self.names[part]] if part in self.names else self.bare(part)
        return ids

    def chat(self, messages: list[dict[str, str]]) -> Pieces:
        """What the family's chat code makes of a dialogue; whether the model has to write it."""
        pieces: Pieces = [(self.beginning, False)]
        if self.family == "qwen" and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
        for message in messages:
            answered = message["role"] == "assistant"
            pieces += [(self.asked(message["role"]), False), (self.original(message["content"]), answered)]
            if self.family != "baichuan":
                pieces += [([self.end], answered), (self.bare("\n"), False)]
            elif answered:
                pieces.append(([self.end], True))
        return pieces

    def asked(self, role: str = "assistant") -> list[int]:
        """What stands before what somebody says."""
        if self.family == "baichuan":
            return [{"user": 195, "assistant": 196}[role]]
        return [self.names["<|im_start|>"], *self.bare(f"{role}\n")]
