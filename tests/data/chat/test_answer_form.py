"""What ends an answer, and its thoughts and words told apart: as each family's template writes them."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.chat_template import chat_template
from data.chat.messages import Said
from data.chat.prompts import Prompts
from data.settings import PLAIN
from data.tokenized.answer_end import answer_end
from tests.data.chat.template_families import FAMILIES
from tests.data.helpers import REWRITING
from tests.data.template_styles import HARMONY, STYLES

QUESTION, THOUGHT, WORDS = Said("user", "ASK?"), "THK one.\n\nTHK two.", "SAY one.\n\n</b> SAY two."
EOS = "<unk>"  # here, where the template ends answers otherwise
ENDS = {"qwen2.5": "<|im_end|>", "llama 3": "<|eot_id|>", "gemma": "<end_of_turn>", "minimax m2": "[e~[", "falcon": EOS}


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_ends_with_the_templates_token_whatever_the_tokenizer_calls_its_end(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    FAMILIES[name].style().put_on(tokenizer)
    tokenizer.eos_token = EOS
    assert answer_end(tokenizer, Prompts()) == {tokenizer.convert_tokens_to_ids(ENDS[name])}
    assert answer_end(tokenizer, Prompts(PLAIN)) == {tokenizer.convert_tokens_to_ids(EOS)}


def test_it_is_the_last_answers_end_and_none_that_ends_a_thought_too(tokenizer: PreTrainedTokenizerBase) -> None:
    HARMONY.put_on(tokenizer)
    assert answer_end(tokenizer, Prompts()) == {tokenizer.convert_tokens_to_ids("<|return|>")}
    FAMILIES["gpt-oss"].style().put_on(tokenizer)  # ends its thoughts with what ends its answers
    assert answer_end(tokenizer, Prompts()) == set()


STYLED = {name: family.style() for name, family in FAMILIES.items()} | STYLES | {"harmony": HARMONY}


@pytest.mark.parametrize("name", STYLED)
def test_what_a_model_writes_is_told_apart_and_asked_again_as_it_was_said(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    template = chat_template(STYLED[name].put_on(tokenizer), REWRITING)
    form = template.answer_form()
    for thought in ("", THOUGHT) if "thought" in form.pattern.groupindex else ("",):
        said = Said("assistant", WORDS, thought, supervised=True)
        prompt, text = template.ask([QUESTION]), template.write([QUESTION, said]).text
        if text.startswith(prompt):  # else no model can have learnt it
            answer = text[len(prompt) : text.index(WORDS, len(prompt)) + len(WORDS)].lstrip()
            assert form.read(answer) == (thought, WORDS)


def test_only_what_has_the_form_is_a_thought(tokenizer: PreTrainedTokenizerBase) -> None:
    form = chat_template(HARMONY.put_on(tokenizer), Prompts()).answer_form()
    assert form.read("<|channel|>analysis<|message|>Let me") == ("Let me", ""), "cut in its middle"
    assert form.read("Lima.<|channel|>final") == ("", "Lima.<|channel|>final")
    form = chat_template(STYLES["qwen3"].put_on(tokenizer), Prompts()).answer_form()
    assert form.read("<think>\nHm.\n</think>") == ("Hm.", ""), "a call follows"
    assert form.read("A tag </think> ends it.") == ("", "A tag </think> ends it.")
