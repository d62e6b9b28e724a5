"""What comes ready made is trained as it stands: segments, token ids, an answer without a question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from data import encode
from data.chat.prompts import PromptFormat
from data.errors import DataError
from data.inspection.summary import facts
from data.records.formats import convert
from data.sample_set import Sample
from data.settings import CHAT_TEMPLATE, PLAIN
from data.tokenized.loading import load_dataset
from data.tokenized.ready_made import PADDED
from data.tokenized.tokenize import encode_tokens
from tests.data.helpers import runs


def sample_of(raw: object, tokenizer: PreTrainedTokenizerBase) -> Sample:
    (record,) = convert(raw).records
    return encode(record, tokenizer, 1000)


def test_segments_are_written_without_anything_around_them(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["Question: 四十二?\nAnswer:", " forty-two", "<|im_end|>", "\n"]
    segments = [{"text": text, "label": number in (1, 2)} for number, text in enumerate(texts)]
    sample = sample_of({"segments": segments}, tokenizer)
    assert sample["input_ids"] == tokenizer("".join(texts), add_special_tokens=False)["input_ids"]
    supervised = [label for label in sample["labels"] if label != -100]
    assert tokenizer.decode(supervised) == " forty-two<|im_end|>"


@pytest.mark.parametrize("labels", [[-100, 5, -100, 7, 8], [3, 5, 6, 7, -100], None])
def test_token_ids_stay_what_they_are(labels: list[int] | None, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [3, 5, 6, 7, 8]
    assert sample_of({"input_ids": ids, "labels": labels}, tokenizer) == {"input_ids": ids, "labels": labels or ids}


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
def test_a_mask_of_ready_made_tokens_says_what_is_trained(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    ids, mask = [3, 5, 6, 7], [0, 0, 1, 1]
    assert sample_of({"input_ids": ids, name: mask}, tokenizer)["labels"] == [-100, -100, 6, 7]
    labels = [3, -100, -100, 7]
    assert sample_of({"input_ids": ids, "labels": labels, name: mask}, tokenizer)["labels"] == [-100, -100, -100, 7]
    for wrong in ([0, 1], [0, 0, 1, 2]):
        with pytest.raises(DataError, match=name if len(wrong) == 4 else "loss_mask: expected 4, one for each"):
            sample_of({"input_ids": ids, name: wrong}, tokenizer)


def test_packed_rows_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [3, 5, 6, 7]
    assert sample_of({"input_ids": ids, "position_ids": [0, 1, 2, 3]}, tokenizer)["labels"] == ids
    with pytest.raises(DataError, match="field position_ids: expected one document, counted from 0"):
        sample_of({"input_ids": ids, "position_ids": [0, 1, 0, 1]}, tokenizer)


def test_a_token_that_the_tokenizer_does_not_have_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError) as caught:
        sample_of({"input_ids": [3, len(tokenizer)]}, tokenizer)
    assert str(caught.value) == (
        f"field input_ids[1]: expected a token of this model's tokenizer, which has {len(tokenizer)}, found "
        f"{len(tokenizer)}"
    )


@pytest.mark.parametrize(
    ("prompt_format", "expected"),
    [
        (
            CHAT_TEMPLATE,
            [
                (False, "<|im_start|>assistant\n"),
                (True, "Hello.<|im_end|>"),
                (False, "\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"),
                (True, "a<|im_end|>"),
                (False, "\n"),
            ],
        ),
        (
            PLAIN,
            [(False, "### Response:\n"), (True, "Hello.<|im_end|>"), (False, "### Response:\n"), (True, "a<|im_end|>")],
        ),
    ],
)
def test_a_conversation_may_begin_with_an_answer(
    prompt_format: PromptFormat, expected: list[tuple[bool, str]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """The original recipe's records do; its words are trained."""
    record = {"type": "conversation", "rounds": [["ans", "Hello."], ["ask", "q"], ["ans", "a"]]}
    found = runs(record, tokenizer, prompt_format)
    assert [supervised for supervised, _ in found] == [supervised for supervised, _ in expected]
    assert all(text.endswith(end) for (_, text), (_, end) in zip(found, expected, strict=True))
    assert [text for supervised, text in found if supervised] == [text for supervised, text in expected if supervised]


@pytest.mark.parametrize("prompt_format", [CHAT_TEMPLATE, PLAIN])
def test_tools_may_be_described_by_json(prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> None:
    rounds = [["ask", "q"], ["ans", "a"]]
    tools = [{"name": "weather", "描述": ["a", 1]}]
    as_text, as_json = (
        runs({"type": "conver_has_api", "api_desc": desc, "rounds": rounds}, tokenizer, prompt_format)
        for desc in (json.dumps(tools, ensure_ascii=False), tools)
    )
    assert as_text == as_json


def test_fields_that_were_not_used_are_named_once(tokenizer_folder: Path, tmp_path: Path) -> None:
    records = [{"question": "q", "answer": "a", "id": number, "level\n": number} for number in range(1, 4)]
    records[0]["hops"] = "2"
    (tmp_path / "a.json").write_text(json.dumps(records), encoding="utf-8")
    for _ in range(2):  # tokenized, and from the cache
        dataset = load_dataset(tmp_path / "a.json", tokenizer_folder, 100, PLAIN, cache_dir=tmp_path / "cache")
        assert dataset.unused == {"level\n": 3, "hops": 1}
        assert "fields that were not used, and in how many records: level\\n (3), hops (1)" in facts(dataset, 100)


@pytest.mark.parametrize(
    ("ids", "mask", "labels", "expected"),
    [
        ([5, 6, 7, 1, 1], [1, 1, 1, 0, 0], [-100, 6, 7, -100, -100], ([5, 6, 7], [-100, 6, 7])),
        ([1, 1, 5, 6, 7], [0, 0, 1, 1, 1], [-100, -100, -100, 6, 7], ([5, 6, 7], [-100, 6, 7])),
        ([1, 5, 6, 1], [0, 1, 1, 0], None, ([5, 6], [5, 6])),
        ([5, 6, 1, 1], [1, 1, 0, 0], [5, 6, 1, 1], ([5, 6], [5, 6])),
        ([5, 6, 7], [1, 1, 1], None, ([5, 6, 7], [5, 6, 7])),
    ],
)
def test_padding_under_a_mask_is_taken_off(
    ids: list[int],
    mask: list[int],
    labels: list[int] | None,
    expected: tuple[list[int], list[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    raw = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    assert sample_of(raw, tokenizer) == {"input_ids": expected[0], "labels": expected[1]}
    loss_mask = [int(label != -100) for label in labels or ids]
    positions = [max(sum(mask[: place + 1]) - 1, 0) for place in range(len(ids))]
    more = {"labels": None, "loss_mask": loss_mask, "position_ids": positions}
    assert sample_of(raw | more, tokenizer)["labels"] == expected[1]


@pytest.mark.parametrize(
    ("mask", "line"),
    [
        ([1, 0, 1, 0], "field attention_mask[1]: expected 1"),
        ([0, 0, 0, 0], "field attention_mask[0]: expected 1"),
        ([1, 1, 0], "field attention_mask: expected 4, one for each of input_ids, found 3"),
        ([1, 1, 1, 1, 0], "field attention_mask: expected 4, one for each of input_ids, found 5"),
        ([1, 1, 1, 2], "field attention_mask[3]: expected 1"),
        ("1111", "field attention_mask: expected a list, found a string"),
    ],
)
def test_a_mask_with_holes_or_of_another_length_is_refused(mask: object, line: str) -> None:
    with pytest.raises(DataError) as refused:
        convert({"input_ids": [5, 6, 7, 8], "attention_mask": mask})
    assert str(refused.value) == line


@pytest.mark.parametrize(
    ("ids", "labels", "told"),
    [
        ([5, 6, 0, 0, 0], None, "3 tokens"),
        ([5, 6, 0], None, "1 token"),
        ([0, 0, 5, 6], None, "2 tokens"),
        ([5, 6, 0, 0], [-100, 6, -100, -100], "2 tokens"),
        ([5, 0, 0, 6], None, None),
        ([5, 6, 2], None, None),
    ],
)
def test_padding_without_a_mask_is_told(
    ids: list[int], labels: list[int] | None, told: str | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    tokens = encode_tokens({"input_ids": ids, "labels": labels}, tokenizer)
    assert tokens.ids == ids
    assert tokens.notes == ({PADDED: f"{told} {tokenizer.pad_token!r}"} if told else {})


@pytest.mark.parametrize(("count", "told"), [(1, False), (2, True)])
def test_a_model_that_pads_with_its_end_trains_one(count: int, told: bool, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    tokens = encode_tokens({"input_ids": [5, 6] + [tokenizer.eos_token_id] * count}, tokenizer)
    assert (PADDED in tokens.notes) == told
    tokenizer.pad_token = None
    assert not encode_tokens({"input_ids": [5, 6, 0, 0]}, tokenizer).notes
