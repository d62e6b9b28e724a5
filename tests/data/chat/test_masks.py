"""Which tokens are trained, token by token: every record type, both formats, byte-level and sentencepiece tokenizers.

The expected texts are written out here and not built from data/chat/prompts.py.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from data.chat.prompts import PromptFormat
from data.errors import DataError
from data.tokenized.tokenize import encode, encode_beginning
from tests.data.helpers import RECORDS, Runs, parse_record, question_ids, runs, supervised_texts, text_of

END = "<|im_end|>"
HEADER = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
INPUT_HEADER = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
)
CALL = 'Thought: 先查层数 🤔.\nAction: count_layers\nAction Input: {"blocks": 30, "名": "块"}\nObservation:'
SECOND_CALL = "Thought: Now the sum.\nAction: sum\nAction Input: {}\nObservation:"
RESULT = (False, " 32 层 ✅\n")
FINAL = (True, "Final Answer: 32 层。<eos>")

CONVERSATION_ANSWERS = ("Set dims to [8, 1].<eos>", "32 blocks + 2 🎉\nSo parts sum to 34.<eos>")


def instruction(text: str) -> str:
    return f"### Instruction:\n{text}\n\n### Response:\n"


def chatml(ask: str) -> str:
    return f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n"


PLAIN: dict[str, Runs] = {
    "instruct": [(False, HEADER + instruction("Name a family.")), (True, "llama, 也有 qwen3 🦙.<eos>")],
    "instruct with input": [
        (False, INPUT_HEADER + "### Instruction:\nTranslate.\n\n### Input:\n你好 🤗\n\n### Response:\n"),
        (True, "Hello!<eos>"),
    ],
    "conversation": [
        (False, HEADER + instruction("I have 8 GPUs.\n怎样划分？")),
        (True, CONVERSATION_ANSWERS[0]),
        (False, "\n\n" + instruction("Why 34?")),
        (True, CONVERSATION_ANSWERS[1]),
    ],
    "api_param as an object": [
        (False, HEADER + "### APIs:\ncount_layers(blocks)\n\n" + instruction("几层？")),
        (True, CALL),
        RESULT,
        (True, SECOND_CALL),
        (False, ' {"sum": [32]}\n'),
        FINAL,
    ],
    "api_param as a string": [
        (False, HEADER + "### APIs:\ncount_layers(blocks)\n\n" + instruction("Hi.")),
        (True, "Ask me.<eos>"),
        (False, "\n\n" + instruction("几层？")),
        (True, CALL),
        RESULT,
        FINAL,
    ],
    "ref_qa": [
        (False, HEADER + "### Reference:\nLion keeps one state.\n\n" + instruction("How many?")),
        (True, "One.<eos>"),
        (False, "\n\n" + instruction("And AdamW?")),
        (True, "两个。<eos>"),
    ],
}
CHAT_QUESTIONS = {
    "instruct": ["Name a family."],
    "instruct with input": ["Translate.\n\n你好 🤗"],
    "conversation": ["I have 8 GPUs.\n怎样划分？", "Why 34?"],
    "api_param as an object": ["APIs:\ncount_layers(blocks)\n\n几层？"],
    "api_param as a string": ["APIs:\ncount_layers(blocks)\n\nHi.", "几层？"],
    "ref_qa": ["Reference:\nLion keeps one state.\n\nHow many?", "And AdamW?"],
}
FORMATS: list[PromptFormat] = ["plain", "chat_template"]


def with_end(expected: Runs, end: str) -> Runs:
    return [(supervised, text.replace("<eos>", end)) for supervised, text in expected]


def in_chatml(name: str) -> Runs:
    """The plain runs with ChatML around them."""
    questions = iter(CHAT_QUESTIONS[name])
    between = [
        (supervised, text if supervised or "### " not in text else "\n" * (number > 0) + chatml(next(questions)))
        for number, (supervised, text) in enumerate(PLAIN[name])
    ]
    return [*between, (False, "\n")]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_format_supervises_the_answers_and_their_end(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    assert runs(RECORDS[name], tokenizer, "plain") == with_end(PLAIN[name], END)


@pytest.mark.parametrize("name", PLAIN)
def test_chat_format_supervises_the_answers_and_their_end(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    assert runs(RECORDS[name], tokenizer, "chat_template") == with_end(in_chatml(name), END)
    assert runs(RECORDS[name], tokenizer) == runs(RECORDS[name], tokenizer, "chat_template")


@pytest.mark.parametrize("name", PLAIN)
def test_sentencepiece_supervises_the_answers_and_their_end(name: str, sentencepiece: PreTrainedTokenizerBase) -> None:
    """Its model puts a blank before every text, also before one that follows `</s>`, as its authors' tokenizer does."""
    expected = with_end(PLAIN[name], "</s>")
    before = ["<s>", *(text for _, text in expected)]
    wanted = [
        (loss, f" {text}" if ahead.endswith("</s>") else text)
        for ahead, (loss, text) in zip(before, expected, strict=False)
    ]
    assert runs(RECORDS[name], sentencepiece) == [(False, f"<s> {wanted[0][1]}"), *wanted[1:]]


def test_pretrain_supervises_every_token_but_the_beginning_of_sequence(
    tokenizer: PreTrainedTokenizerBase, sentencepiece: PreTrainedTokenizerBase
) -> None:
    text = RECORDS["pretrain"]["text"]
    for prompt_format in FORMATS:
        assert runs(RECORDS["pretrain"], tokenizer, prompt_format) == [(True, text + END)]
    assert runs(RECORDS["pretrain"], sentencepiece, "plain") == [(False, "<s>"), (True, f" {text}</s>")]


def test_a_model_goes_on_behind_the_ids_that_a_pretrain_record_begins_with(
    tokenizer: PreTrainedTokenizerBase, sentencepiece: PreTrainedTokenizerBase
) -> None:
    for each in (tokenizer, sentencepiece):
        *trained, end = encode(RECORDS["pretrain"], each, 100)["input_ids"]
        assert end == each.eos_token_id
        assert encode_beginning(RECORDS["pretrain"]["text"], each) == trained


def test_tokens_that_split_a_character_are_all_supervised(
    tokenizer: PreTrainedTokenizerBase, sentencepiece: PreTrainedTokenizerBase
) -> None:
    record = {"type": "instruct", "instruct": "🤗", "output": "🤗"}
    for each in (tokenizer, sentencepiece):
        sample = encode(record, each, 1000, "plain")
        answer = [label for label in sample["labels"] if label != -100]
        assert len(answer) > 4
        assert text_of(answer[:-1], each) == "🤗"


def test_any_answer_is_supervised_from_its_first_to_its_last_character(tokenizer: PreTrainedTokenizerBase) -> None:
    characters = st.characters(exclude_categories=["Cs", "Co"])

    @settings(max_examples=60, deadline=None)
    @given(answer=st.text(characters, min_size=1).filter(lambda text: text == text.strip()))
    def check(answer: str) -> None:
        record = {"type": "instruct", "instruct": "Say it.", "output": answer}
        for prompt_format in FORMATS:
            assert supervised_texts(record, tokenizer, prompt_format) == [answer + END]

    check()


@pytest.mark.parametrize("prompt_format", FORMATS)
@pytest.mark.parametrize("name", RECORDS)
def test_samples_are_the_same_from_objects_and_parsed_records_and_cut_at_the_end(
    name: str, prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase
) -> None:
    whole = encode(RECORDS[name], tokenizer, 100_000, prompt_format)
    assert encode(parse_record(RECORDS[name]), tokenizer, 100_000, prompt_format) == whole
    assert all(label in (token, -100) for token, label in zip(whole["input_ids"], whole["labels"], strict=True))
    cut = encode(RECORDS[name], tokenizer, 20, prompt_format)
    assert cut == {"input_ids": whole["input_ids"][:20], "labels": whole["labels"][:20]}
    assert len(cut["input_ids"]) == 20


@pytest.mark.parametrize("name", PLAIN)
def test_a_model_is_asked_exactly_as_it_was_trained(
    name: str, tokenizer: PreTrainedTokenizerBase, sentencepiece: PreTrainedTokenizerBase
) -> None:
    cases: list[tuple[PreTrainedTokenizerBase, PromptFormat]] = [(tokenizer, "plain"), (tokenizer, "chat_template")]
    for each, prompt_format in [*cases, (sentencepiece, "plain")]:
        sample = encode(RECORDS[name], each, 100_000, prompt_format=prompt_format)
        for turns in range(1, len(CHAT_QUESTIONS[name]) + 1):
            asked = question_ids(RECORDS[name], each, prompt_format, turns)
            assert asked == sample["input_ids"][: len(asked)]
            assert sample["labels"][len(asked) - 1] == -100
            assert sample["labels"][len(asked)] == sample["input_ids"][len(asked)]


def test_a_tokenizer_without_end_of_sequence_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no eos_token"):
        encode(RECORDS["pretrain"], tokenizer, 100)


def test_the_chat_format_without_a_template_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    assert supervised_texts(RECORDS["instruct"], tokenizer) == ["llama, 也有 qwen3 🦙.<|im_end|>"]
    with pytest.raises(DataError, match="no chat template; use prompt_format: plain"):
        encode(RECORDS["instruct"], tokenizer, 100, "chat_template")
