"""Build the tokenizer of each family that ships a vocabulary and no tokenizer.json.

Each function gets the vocabulary's path and tokenizer_config.json, and returns a tokenizer with its special tokens and
its template as published. All raise `DataError` where the vocabulary is damaged or does not fit the settings.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers, processors
from transformers.convert_slow_tokenizer import TikTokenConverter

from data.chat.native.pieces import BYTE, CONTROLS, NAMED, NORMAL, bpe, read_json, read_model, stated_tokens
from data.errors import DataError

Built = tuple[Tokenizer, dict[str, Any]]

CHATML_TOKENS = {"im_end_token": "<|im_end|>"}
CHATML = (  # as InternLM2 and Qwen were published, but for what stands before the messages
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def llama(path: Path, settings: dict[str, Any]) -> Built:
    """Build LLaMA's and Mistral's, and those of their fine-tunes.

    transformers 5 merges runs of spaces in another order than sentencepiece for these folders, and leaves `<s>` out
    where tokenizer_config.json does not ask for it. transformers 4, servers and the models' authors put it there. With
    `"legacy": false` a text gets a dummy prefix, and what stands behind a control token gets none.
    """
    proto = read_model(path)
    prefix, stated = proto.normalizer_spec.add_dummy_prefix, settings.get("add_prefix_space")
    if stated not in (None, prefix):
        raise DataError(
            f"{path.with_name('tokenizer_config.json')}: add_prefix_space: {stated!r}, but {path.name} has {prefix}; "
            "take the key out, or fetch both again"
        )

    # `tokenizers` normalizes a text before it looks for such tokens, so that it has one beginning; else each part has.
    once: dict[str, bool] = {"normalized": True} if prefix and settings.get("legacy") is False else {}
    older = path.with_name("added_tokens.json")  # a token's id by its name
    added = {number: AddedToken(name, normalized=bool(once)) for name, number in read_json(older).items()}
    added |= stated_tokens(path, settings, **once)
    if once and (stripping := [each.content for each in added.values() if each.lstrip or each.rstrip]):
        raise DataError(
            f"{path}: with legacy: false, {stripping[0]!r} cannot take blanks in; expected a tokenizer.json"
        )

    names = [*CONTROLS, *(token.content for token in added.values())] if once else []
    tokenizer = bpe(proto, [piece.piece for piece in proto.pieces], bare=names)
    tokenizer.add_special_tokens([AddedToken(name, normalized=bool(once)) for name in CONTROLS])
    for number in sorted(added):
        tokenizer.add_tokens([added[number]])
        if tokenizer.token_to_id(added[number].content) != number:
            raise DataError(f"{path}: the added token {added[number].content!r} cannot get its id {number}")
    return tokenizer, NAMED | {"pad_token": None, "add_bos_token": True, "add_eos_token": False, "chat_template": None}


def internlm2(path: Path, settings: dict[str, Any]) -> Built:
    """Build InternLM2's and 2.5's, some of whose spare pieces tokenizer_config.json makes control tokens.

    `added_tokens_decoder` there names ids: `<|im_start|>` is what the model calls `[UNUSED_TOKEN_146]`, which then is
    text like any other. Spare pieces without a name are cut out of a text, as sentencepiece does it.
    """
    proto = read_model(path)
    added = stated_tokens(path, settings)
    names = [added[number].content if number in added else piece.piece for number, piece in enumerate(proto.pieces)]
    tokenizer = bpe(proto, names)
    tokenizer.add_special_tokens(CONTROLS)
    tokenizer.add_tokens([added[number] for number in sorted(added)])

    if lost := [number for number in sorted(added) if tokenizer.token_to_id(added[number].content) != number]:
        raise DataError(f"{path}: has no room for the ids {lost} of added_tokens_decoder in tokenizer_config.json")
    options = NAMED | {"pad_token": "</s>", "add_bos_token": True, "chat_template": None}
    if tokenizer.token_to_id(CHATML_TOKENS["im_end_token"]) is not None:
        options |= {"chat_template": "{{ bos_token }}" + CHATML, "extra_special_tokens": CHATML_TOKENS}
    return tokenizer, options


# Names of Baichuan's and Baichuan2's pieces 195 and 196: user and assistant.
FIRST, SECOND = ["<reserved_102>", "<reserved_103>"], ["<reserved_106>", "<reserved_107>"]
SYSTEM = "{% elif message['role'] == 'system' and loop.first %}{{ message['content'] }}"  # only the second takes one
# What the models' own chat code asks, and after each answer the </s> that the model has to stop at. Baichuan2's code
# leaves </s> out of the history and trains it as the label of the next <reserved_106>; here a label is its own token.
BAICHUAN = (
    "{% for message in messages %}{% set words = message['content'] and '@blank' + message['content'] %}"
    "{% if message['role'] == 'user' %}{{ '@user' + words }}"
    "{% elif message['role'] == 'assistant' %}{{ '@assistant' + words + '</s>' }}"
    "@system{% else %}{{ raise_exception('unexpected role ' + message['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}@assistant{% endif %}"
)


def baichuan(path: Path, _: dict[str, Any]) -> Built:
    """Build Baichuan's and Baichuan2's, two of whose user-defined pieces say who speaks.

    The first generation has a dummy prefix. The original builds its prompts from ids and encodes each content apart:
    with a dummy prefix, which is a blank in the template.
    """
    proto = read_model(path)
    names = [piece.piece for piece in proto.pieces]
    roles = names[195:197]
    tokenizer = bpe(proto, names, bare=roles)
    tokenizer.add_special_tokens(CONTROLS)
    template = None
    if roles in (FIRST, SECOND):
        template = BAICHUAN.replace("@user", roles[0]).replace("@assistant", roles[1])
        template = template.replace("@blank", " " if proto.normalizer_spec.add_dummy_prefix else "")
        template = template.replace("@system", SYSTEM if roles == SECOND else "")
    return tokenizer, NAMED | {"pad_token": "<unk>", "add_bos_token": False, "chat_template": template}


MARK = "\ufdd0"  # at the end of ChatGLM3's control tokens
COMMANDS = "[MASK] [gMASK] [sMASK] sop eop <|system|> <|user|> <|assistant|> <|observation|>".split()
# The published prompt, marks aside. The original encodes "\n" and the content apart, each with its dummy prefix: the
# first comes from the normaliser, which sees a new text after every control token, the second is the blank here.
CHATGLM3 = (
    "[gMASK]\ufdd0sop\ufdd0{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'observation'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|{{ message['role'] }}|>\ufdd0\n {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\ufdd0{% endif %}"
)


def chatglm3(path: Path, _: dict[str, Any]) -> Built:
    """Build ChatGLM3's, which has a dummy prefix, and control tokens that no text can write.

    The words `<|user|>`, `</s>` and `sop` in somebody's text are text ("philosophy" holds a `sop`); only the chat
    prompt's own are control tokens. The original builds its prompts from ids, but a chat template can only write text.
    So control tokens are named with a mark at the end, a code point that Unicode sets aside for use inside a program:
    the template and `eos_token` write it, people do not, and decoding drops it. Their ids are at hand as
    `tokenizer.user_token_id` and the like. A template in the folder is passed over, as it cannot write the marks.
    """
    proto = read_model(path)
    names = [piece.piece if piece.type in (NORMAL, BYTE) else piece.piece + MARK for piece in proto.pieces]
    names += [name + MARK for name in COMMANDS]

    # A control token's mark goes, and the dummy prefix of the text after it (\A: the very beginning).
    tokenizer = bpe(proto, names, dropped=rf"\A |{MARK} ?")
    tokenizer.add_special_tokens([name for name in names if name.endswith(MARK)])
    prefix = ["[gMASK]" + MARK, "sop" + MARK]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*prefix, "$A"], special_tokens=[(name, names.index(name)) for name in prefix]
    )

    options = dict.fromkeys(("unk_token", "pad_token"), "<unk>" + MARK) | {"eos_token": "</s>" + MARK}
    roles = {f"{name.strip('<|>')}_token": name + MARK for name in COMMANDS[5:]}
    return tokenizer, options | {
        "extra_special_tokens": roles,
        "padding_side": "left",
        "chat_template": CHATGLM3,
    }


# Qwen: how a text is cut before pairs are merged, and the names behind the ranks, both as published.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"
SPECIALS = [END, "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))]
HELPFUL = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
)


def qwen(path: Path, settings: dict[str, Any]) -> Built:
    """Build the first Qwen's: byte pairs ranked by qwen.tiktoken, and control tokens numbered behind them.

    transformers' own converter makes it. As in the original, a control token's name is one in any text.
    """
    if more := settings.get("extra_vocab_file"):
        raise DataError(f"{path}: extra_vocab_file ({more}) is not read; expected a tokenizer.json")
    ranks = _read_ranks(path)
    converter = TikTokenConverter(pattern=PATTERN, extra_special_tokens=SPECIALS)
    converter.load_tiktoken_bpe = lambda _: ranks  # which would need another library
    tokenizer = converter.converted()
    tokenizer.normalizer = normalizers.NFC()
    options = {"chat_template": HELPFUL + CHATML, "extra_special_tokens": CHATML_TOKENS}
    return tokenizer, options | {"eos_token": END, "pad_token": END}


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Read lines of bytes in base 64 and the line's number. Were a line lost, others would have its id."""
    content = path.read_bytes()
    ranks: dict[bytes, int] = {}
    try:
        for token, rank in map(bytes.split, content.splitlines()):
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError:
        ranks.clear()
    in_order = list(ranks.values()) == list(range(len(content.splitlines())))
    if not (in_order and content.endswith(b"\n") and all(bytes([byte]) in ranks for byte in range(256))):
        raise DataError(f"{path}: damaged, or not the ranks of byte pairs; fetch the file again")
    return ranks
