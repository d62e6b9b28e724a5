"""Find the token that ends an answer, which may differ from the tokenizer's end of sequence.

It ends the last answer of a dialogue: behind others a template may write another token (gpt-oss does).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import chain

from transformers import PreTrainedTokenizerBase

from data.chat.prompts import Prompts
from data.errors import DataError
from data.settings import GDGPT
from data.tokenized.tokenize import encode_tokens

QUESTION = {"role": "user", "content": "?"}
ANSWER = {"role": "assistant", "content": "!", "reasoning_content": "."}


def answer_end(tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> set[int]:
    """Return the token's id; none if the end is text, or may stand within an answer, behind a thought."""
    if prompts.prompt_format == GDGPT:  # which writes the end of sequence twice
        return {tokenizer.eos_token_id}
    asked = replace(prompts, template_fallback="rewrite", mask="assistant")
    with suppress(DataError):
        tokens = encode_tokens({"type": "chat", "messages": [QUESTION, ANSWER]}, tokenizer, asked)
        *within, last = list(chain.from_iterable(tokens.ids[begin:end] for begin, end in tokens.loss)) or [-1]
        if last not in within and last in {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}:
            return {last}
    return set()
