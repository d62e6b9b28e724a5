"""The tokenizers of ChatGLM3 and Baichuan2, built from tokenizer.model without the Python files of their folders.

Both ship a sentencepiece BPE model and a tokenizer class of their own that must never run (and no longer can). Here the
model is rebuilt as a `tokenizers` BPE, which tells where its tokens lie in the text:

- sentencepiece merges the neighbours whose joint piece has the best score, so every way to cut a piece into two pieces
  becomes a merge, ranked by the score of the whole;
- what no piece covers falls back to bytes; Baichuan2's user-defined pieces are cut out of the text first;
- ChatGLM3 puts a blank (the dummy prefix) before every text, Baichuan2 does not.

The ids equal the original classes' on every text of the golden vectors. One thing needs care: in ChatGLM3 the words
`<|user|>`, `</s>` and `sop` in somebody's text are text ("philosophy" holds a `sop`); only the chat prompt's own are
control tokens. The original builds its prompts from ids, but a chat template can only write text. So ChatGLM3's control
tokens are named with a mark at the end, U+FDD0, a code point that Unicode sets aside for use inside a program: the
template and `eos_token` write it, people do not, and decoding drops it. Their ids are at hand as
`tokenizer.user_token_id` and the like.

Cost: 0.6 seconds for the 65 thousand pieces of ChatGLM3, 1 second for the 126 thousand of Baichuan2, once a process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]  # made at run time
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.errors import DataError

CLASSES = {"ChatGLMTokenizer": "chatglm", "BaichuanTokenizer": "baichuan"}

FIRST_VOCABULARY = range(64_000, 65_000)  # of the first Baichuan, which names its roles otherwise

# Piece types, as sentencepiece numbers them in the file.
NORMAL, USER_DEFINED, BYTE = 1, 4, 6
BPE_MODEL = 2

CONTROLS = ["<unk>", "<s>", "</s>"]  # the first three pieces of both models
MARK = "\ufdd0"
CHATGLM3_COMMANDS = "[MASK] [gMASK] [sMASK] sop eop <|system|> <|user|> <|assistant|> <|observation|>".split()
CHATGLM3_NAMED = {f"{role}_token": f"<|{role}|>{MARK}" for role in ("system", "user", "assistant", "observation")}
# The published prompt, marks aside. The original encodes "\n" and the content apart, each with its dummy prefix: the
# first comes from the normaliser, which sees a new text after every control token, the second is the blank here. A
# template in the folder is passed over, as it cannot write the marks.
CHATGLM3_TEMPLATE = (
    "[gMASK]\ufdd0sop\ufdd0{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'observation'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|{{ message['role'] }}|>\ufdd0\n {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\ufdd0{% endif %}"
)
# What the model's own chat code asks, and after each answer the </s> that the model has to stop at. That code leaves
# </s> out of the history and trains it as the label of the next <reserved_106>; here a label is the token itself.
BAICHUAN2_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<reserved_106>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<reserved_107>' + message['content'] + '</s>' }}"
    "{% elif message['role'] == 'system' and loop.first %}{{ message['content'] }}"
    "{% else %}{{ raise_exception('unexpected role ' + message['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<reserved_107>{% endif %}"
)


def native_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a ChatGLM3 or Baichuan2 folder; None for any other, and where there is a tokenizer.json.

    Raises:
        DataError: the folder's tokenizer.model is missing or damaged, or that of the first Baichuan.
    """
    settings = _read_json(folder / "tokenizer_config.json")
    stated, config = settings.get("tokenizer_class"), _read_json(folder / "config.json")
    family = CLASSES.get(stated) if stated else config.get("model_type")
    if family not in CLASSES.values() or (folder / "tokenizer.json").is_file():
        return None
    if family == "baichuan" and config.get("vocab_size") in FIRST_VOCABULARY:
        raise DataError(f"{folder}: the first Baichuan, whose chat is another; expected a tokenizer.json")
    proto = _read_model(folder / "tokenizer.model")
    return _chatglm3(proto) if family == "chatglm" else _baichuan2(proto, settings)


def export_tokenizer(source: Path, target: Path) -> None:
    """Write the tokenizer of a ChatGLM3 or Baichuan2 folder as a tokenizer.json, which needs no code to load.

    generation_config.json gets the tokens that end an answer. A folder without a tokenizer is left without one.

    Raises:
        DataError: the source's tokenizer.model is damaged.
    """
    if not (source / "tokenizer.model").is_file():
        return
    tokenizer = native_tokenizer(source)
    if tokenizer is None:
        return
    tokenizer.save_pretrained(target)
    path = target / "generation_config.json"
    settings = _read_json(path) | {"eos_token_id": sorted(end_tokens(tokenizer))}
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids that end an answer: the end of sequence, and the roles that a ChatGLM3 hands over to."""
    names = ("eos_token_id", "user_token_id", "observation_token_id")
    return {number for name in names if (number := getattr(tokenizer, name, None)) is not None}


def _chatglm3(proto: ModelProto) -> PreTrainedTokenizerFast:
    vocab = {
        piece.piece if piece.type in (NORMAL, BYTE) else piece.piece + MARK: number
        for number, piece in enumerate(proto.pieces)
    }
    vocab |= {name + MARK: number for number, name in enumerate(CHATGLM3_COMMANDS, start=len(vocab))}
    tokenizer = _bpe(proto, vocab)
    tokenizer.add_special_tokens([name for name in vocab if name.endswith(MARK)])
    prefix = ["[gMASK]" + MARK, "sop" + MARK]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*prefix, "$A"], special_tokens=[(name, vocab[name]) for name in prefix]
    )
    return _wrap(
        tokenizer,
        unk_token="<unk>" + MARK,
        pad_token="<unk>" + MARK,
        eos_token="</s>" + MARK,
        extra_special_tokens=CHATGLM3_NAMED,
        padding_side="left",
        chat_template=CHATGLM3_TEMPLATE,
    )


def _baichuan2(proto: ModelProto, settings: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokenizer = _bpe(proto, {piece.piece: number for number, piece in enumerate(proto.pieces)})
    tokenizer.add_special_tokens(CONTROLS)
    tokenizer.add_tokens(
        [AddedToken(piece.piece, normalized=False) for piece in proto.pieces if piece.type == USER_DEFINED]
    )
    return _wrap(
        tokenizer,
        unk_token="<unk>",
        pad_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        add_bos_token=bool(settings.get("add_bos_token")),
        chat_template=settings.get("chat_template") or BAICHUAN2_TEMPLATE,
    )


def _wrap(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **options,
    )


def _bpe(proto: ModelProto, vocab: dict[str, int]) -> Tokenizer:
    """sentencepiece's BPE, its white space mark included; user-defined pieces are for the caller to cut out."""
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=_merges(proto), byte_fallback=True))
    blanks = normalizers.Replace(" ", "▁")
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
        # A control token's mark goes, and the dummy prefix of the text after it (\A: the very beginning).
        decoding.append(decoders.Replace(Regex(rf"\A |{MARK} ?"), ""))
    else:
        tokenizer.normalizer = blanks
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(proto: ModelProto) -> list[tuple[str, str]]:
    """Every cut of a piece into two pieces, best score of the whole first."""
    pieces = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    merges = []
    for whole in sorted(pieces, key=lambda piece: -pieces[piece]):
        cuts = ((whole[:place], whole[place:]) for place in range(1, len(whole)))
        merges += [cut for cut in cuts if cut[0] in pieces and cut[1] in pieces]
    return merges


def _read_model(path: Path) -> ModelProto:
    proto = ModelProto()
    if not path.is_file():
        raise DataError(f"{path}: not found; expected the sentencepiece model that the checkpoint ships")
    try:
        proto.ParseFromString(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except DecodeError:
        proto.Clear()
    # A file that was cut loses what stands at its end: the trainer's settings, which say that it is BPE. A damaged
    # name is no string any more, or stands there twice.
    names = [piece.piece for piece in proto.pieces]
    whole = (
        proto.trainer_spec.model_type == BPE_MODEL
        and names[:3] == CONTROLS
        and sum(piece.type == BYTE for piece in proto.pieces) == 256
        and len(set(names)) == len(names)
        and all(name and isinstance(name, str) for name in names)
    )
    if not whole:
        raise DataError(f"{path}: damaged, or no sentencepiece BPE model with byte fallback; fetch the file again")
    return proto


def _read_json(path: Path) -> dict[str, Any]:
    """A settings file's object; empty where there is none to read."""
    if not path.is_file():  # a pipe would never end
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}
