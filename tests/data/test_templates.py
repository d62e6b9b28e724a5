"""Chat templates of the kinds that real models ship: what is supervised is what the model has to write itself.

That is each answer, the end-of-turn token and whatever else stands between the question and the answer.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.errors import DataError
from data.tokenized.tokenize import encode
from tests.data.helpers import question_ids, runs, supervised_texts

RECORD: dict[str, Any] = {
    "type": "conversation",
    "rounds": [["ask", "Which family?"], ["ask", "Say it."], ["ans", "Beta 好 🤗"], ["ask", "And?"], ["ans", "Delta"]],
}
ONE_TURN = {"type": "instruct", "instruct": "Which family?", "output": "Beta"}

DEFAULT_SYSTEM = (  # SmolLM2
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMING = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
)
MISTRAL = ALTERNATING + "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
MIXTRAL = ALTERNATING + "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_END = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
BYTE_LEVEL = {
    "default system": (DEFAULT_SYSTEM, ["Beta 好 🤗<|im_end|>", "Delta<|im_end|>"]),
    "trimming": (TRIMMING, ["Beta 好 🤗<|im_end|>", "Delta<|im_end|>"]),
    "llama3": (LLAMA3, ["Beta 好 🤗<|eot_id|>", "Delta<|eot_id|>"]),
    "mistral": (MISTRAL, ["Beta 好 🤗<|im_end|>", "Delta<|im_end|>"]),
    "mixtral": (MIXTRAL, [" Beta 好 🤗<|im_end|>", " Delta<|im_end|>"]),
    "llama2": (LLAMA2, [" Beta 好 🤗 <|im_end|>", " Delta <|im_end|>"]),
    "qwen3": (QWEN3, ["Beta 好 🤗<|im_end|>", "<think>\n\n</think>\n\nDelta<|im_end|>"]),
}
SENTENCEPIECE = {
    "mistral": (MISTRAL, ["Beta 好 🤗</s>", "Delta</s>"]),
    "mixtral": (MIXTRAL, [" Beta 好 🤗</s>", " Delta</s>"]),
    "llama2": (LLAMA2, [" Beta 好 🤗 </s>", " Delta </s>"]),
}


def with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = template
    if template is LLAMA3:
        names = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        tokenizer.add_tokens(names, special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_the_answers_and_their_end_of_turn_are_supervised(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    template, expected = BYTE_LEVEL[name]
    assert supervised_texts(RECORD, with_template(tokenizer, template)) == expected


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_the_first_word_is_supervised_where_sentencepiece_joins_it_with_a_space(
    name: str, sentencepiece: PreTrainedTokenizerBase
) -> None:
    template, expected = SENTENCEPIECE[name]
    assert supervised_texts(RECORD, with_template(sentencepiece, template)) == expected


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_the_whole_sample_is_what_the_template_writes(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    template, _ = BYTE_LEVEL[name]
    written = with_template(tokenizer, template).apply_chat_template(
        [
            {"role": "user", "content": "Which family?\nSay it."},
            {"role": "assistant", "content": "Beta 好 🤗"},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "Delta"},
        ],
        tokenize=False,
    )
    assert "".join(text for _, text in runs(RECORD, tokenizer)) == written


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_a_model_is_asked_exactly_as_it_was_trained(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    template, _ = BYTE_LEVEL[name]
    sample = encode(RECORD, with_template(tokenizer, template), 1000)
    for turns in (1, 2):
        asked = question_ids(RECORD, tokenizer, "chat_template", turns)
        assert asked == sample["input_ids"][: len(asked)]
        assert sample["labels"][len(asked) - 1] == -100
        assert sample["labels"][len(asked)] == sample["input_ids"][len(asked)]


def test_a_default_system_prompt_is_not_supervised(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n"
        "<|im_start|>user\nWhich family?<|im_end|>\n<|im_start|>assistant\n"
    )
    expected = [(False, prompt), (True, "Beta<|im_end|>"), (False, "\n")]
    assert runs(ONE_TURN, with_template(tokenizer, DEFAULT_SYSTEM)) == expected


def test_an_answer_that_the_template_trims_is_supervised_as_it_is_written(tokenizer: PreTrainedTokenizerBase) -> None:
    record = ONE_TURN | {"output": " Beta \n"}
    assert supervised_texts(record, with_template(tokenizer, TRIMMING)) == ["Beta<|im_end|>"]
    assert supervised_texts(record, with_template(tokenizer, DEFAULT_SYSTEM)) == [" Beta \n<|im_end|>"]


def test_an_api_result_is_not_supervised_inside_a_trimmed_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    action = {"inner_thought": "Look.", "api_name": "find", "api_param": {}, "api_res": "found"}
    rounds = [["ask", "Where?"], ["ans-api", {"actions": [action], "ans": "Here. "}]]
    record = {"type": "conver_has_api", "api_desc": "find()", "rounds": rounds}
    assert supervised_texts(record, with_template(tokenizer, TRIMMING)) == [
        "Thought: Look.\nAction: find\nAction Input: {}\nObservation:",
        "Final Answer: Here.<|im_end|>",
    ]


def test_a_template_without_end_of_turn_gets_the_end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> None:
    (supervised,) = supervised_texts(ONE_TURN, with_template(tokenizer, NO_END))
    assert supervised.strip() == "Beta<|im_end|>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (TRIMMING.replace("message['content'] | trim", "message['content'] | upper"), "changes the words of an answer"),
        (TRIMMING.replace("message['content'] | trim", "''"), "leaves out what the user says"),
        (ALTERNATING.replace("!=", "==") + "{% endif %}{% endfor %}", "refuses the record: roles must alternate"),
        ("{{ raise_exception('no\\nchat') }}", "refuses the record: no chat"),
        ("{% for %}", "refuses the record"),
    ],
)
def test_a_template_that_changes_or_refuses_the_record_is_reported_in_one_line(
    template: str, reason: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        encode(RECORD, with_template(tokenizer, template), 1000)
    assert "\n" not in str(caught.value)
