"""Baichuan and Baichuan2: sentencepiece models, two of whose user-defined pieces say who speaks.

The generations have other names for these, 195 and 196, and the first has a dummy prefix. The original builds its
prompts from ids and encodes each content apart: with a dummy prefix, which is a blank in the template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data.chat.native.pieces import CONTROLS, NAMED, bpe, read_model

FIRST, SECOND = ["<reserved_102>", "<reserved_103>"], ["<reserved_106>", "<reserved_107>"]  # user and assistant
SYSTEM = "{% elif message['role'] == 'system' and loop.first %}{{ message['content'] }}"  # only the second takes one
# What the models' own chat code asks, and after each answer the </s> that the model has to stop at. Baichuan2's code
# leaves </s> out of the history and trains it as the label of the next <reserved_106>; here a label is its own token.
TEMPLATE = (
    "{% for message in messages %}{% set words = message['content'] and '@blank' + message['content'] %}"
    "{% if message['role'] == 'user' %}{{ '@user' + words }}"
    "{% elif message['role'] == 'assistant' %}{{ '@assistant' + words + '</s>' }}"
    "@system{% else %}{{ raise_exception('unexpected role ' + message['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}@assistant{% endif %}"
)


def build(path: Path, _: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Build the tokenizer, its special tokens, and its template where it has the pieces of one."""
    proto = read_model(path)
    names = [piece.piece for piece in proto.pieces]
    roles = names[195:197]
    tokenizer = bpe(proto, names, bare=roles)
    tokenizer.add_special_tokens(CONTROLS)
    template = None
    if roles in (FIRST, SECOND):
        template = TEMPLATE.replace("@user", roles[0]).replace("@assistant", roles[1])
        template = template.replace("@blank", " " if proto.normalizer_spec.add_dummy_prefix else "")
        template = template.replace("@system", SYSTEM if roles == SECOND else "")
    return tokenizer, NAMED | {"pad_token": "<unk>", "add_bos_token": False, "chat_template": template}
