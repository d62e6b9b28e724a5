"""Classes and rewards: a label means one class, no text is too short, and nothing that is said of it is dropped."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.prompts import Prompts
from data.errors import DataError
from data.inspection.summary import warnings
from data.records.formats import convert
from data.settings import PLAIN, Wanted
from tests.data.caches import JUDGED_LIMIT

JSON = dict[str, Any]
STARS = ("1", "2", "3", "4", "5")


def class_of(label: Any, *names: str) -> int | str:
    """The number of the class that a record has, or why it is refused."""
    try:
        (judged,) = convert({"text": "t", "label": label}, preference=Wanted("classes", names)).judged
    except DataError as error:
        assert "\n" not in str(error)
        return str(error)
    assert type(judged.value) is int
    return judged.value


@pytest.mark.parametrize(
    ("names", "label", "expected"),
    [
        (STARS, "1", 0),
        (STARS, "5", 4),
        (("-1", "0", "1"), "0", 1),
        (("0", "1", "2"), 1, 1),
        (("0", "1", "2"), "1", 1),
        (("0", "1", "2"), 1.0, 1),
        (("negative", "positive"), "1", 1),
        (("negative", "positive"), 1, 1),
        (("negative", "positive"), "1.0", 1),
        (("negative", "positive"), True, 1),
        (("negative", "positive"), "True", 1),
        (("false", "true"), True, 1),
        (("false", "true"), 1, 1),
        (("true", "false"), "true", 0),
        ((), 7, 7),
        ((), "7", 7),
    ],
)
def test_a_number_is_a_class_whether_json_or_a_table_says_it(names: tuple[str, ...], label: Any, expected: int) -> None:
    assert class_of(label, *names) == expected


@pytest.mark.parametrize(
    ("names", "label", "found"),
    [
        (STARS, 1, "'1' is class 0"),
        (STARS, 0, "'1' is class 0"),
        (STARS, "0", "'1' is class 0"),
        (("-1", "0", "1"), 0, "'-1' is class 0"),
        (("1.0", "2.0"), 1, "'1.0' is class 0"),
        (("0", "2", "1"), 0, "'2' is class 1"),
        (("true", "false"), True, "'true' is class 0"),
        (("true", "false"), 1, "'true' is class 0"),
        (("1", "other"), 1, "'1' is class 0"),
    ],
)
def test_a_number_is_refused_where_a_name_is_another_one(names: tuple[str, ...], label: Any, found: str) -> None:
    assert class_of(label, *names) == (
        f"field label: {label!r} may be a name or a number from 0 here, as in the key labels {found}; expected one of "
        f"{', '.join(names)}, as a text, or labels in the order of their numbers from 0"
    )


@pytest.mark.parametrize("label", ["other", "-1", "2", 0.5, "0.5", [1], "١", "1e0"])
def test_what_is_no_class_is_refused_as_ever(label: Any) -> None:
    line = f"field label: expected a number from 0 or one of ham, spam; found {label!r}"
    assert class_of(label, "ham", "spam") == line


def test_a_missing_label_is_one_of_the_key_labels() -> None:
    line = class_of(None, "ham", "spam")
    assert line == "field label: missing; expected one, as the key labels is for such records"


SHORT: list[JSON] = [
    {"text": "x", "label": 0},
    {"text": "y", "label": 1},
    {"text": "The museum is closed.", "label": 0},
]


@pytest.mark.parametrize("count", [2, 3])
def test_a_text_of_one_token_has_a_class(count: int, load_judged: Any) -> None:
    """Its last token is scored; that nothing predicts the first one is no matter."""
    dataset = load_judged(*SHORT[:count], wanted=Wanted("classes", ("negative", "positive")))
    assert dataset.lengths.tolist()[:2] == [1, 1] and len(dataset) == count
    assert (dataset.supervised == dataset.lengths).all()
    assert dataset.total.silent == 0 and not [line for line in warnings(dataset, JUDGED_LIMIT) if "left out" in line]


def test_tokens_are_scored_whatever_their_labels(load_judged: Any) -> None:
    """Of a model that scores, no token is trained to be predicted."""
    ids = [{"input_ids": ids, "labels": [-100] * len(ids)} for ids in ([5, 6, 7], [5, 6], [8])]
    dataset = load_judged(*({**each, "label": 0} for each in ids), wanted=Wanted("classes"))
    assert dataset.lengths.tolist() == dataset.supervised.tolist() == [3, 2, 1]
    dataset = load_judged(
        {"chosen": ids[0], "rejected": ids[1]}, {"chosen": ids[2], "rejected": ids[1]}, wanted=Wanted("rewards")
    )
    assert dataset.lengths.tolist() == dataset.supervised.tolist() == [5, 3]
    assert dataset.first_supervised.tolist() == [3, 1]


def test_rewards_are_of_the_same_pairs(load_judged: Any) -> None:
    """Of those whose answers the limit cuts off, too: they are equal."""
    cut = {"prompt": "word " * 100, "chosen": "a", "rejected": "b"}
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    dataset = load_judged(pair, cut, wanted=Wanted("rewards"), limit=64)
    assert (len(dataset), dataset.total.equal, dataset.total.silent) == (1, 1, 0)
    assert dataset.samples[0]["input_ids"].tolist() == load_judged(pair, limit=64).samples[0]["input_ids"].tolist()


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ({"text": "a", "text_pair": "b"}, "text_pair"),
        ({"text": "a", "sentence2": "b"}, "sentence2"),
        ({"text": "a", "text_b": "b"}, "text_b"),
        ({"text": "a", "hypothesis": "b"}, "hypothesis"),
        ({"text": "a", "Sentence_2": "b"}, "Sentence_2"),
        ({"messages": [{"role": "user", "content": "a"}], "text_pair": "b"}, "text_pair"),
    ],
)
def test_a_second_text_is_refused_by_its_name(raw: JSON, name: str) -> None:
    with pytest.raises(DataError) as refused:
        convert(raw | {"label": 0}, preference=Wanted("classes"))
    assert str(refused.value) == (f"field {name}: a second text beside the first; expected both in one, or none")


@pytest.mark.parametrize(
    ("first", "second"), [("premise", "hypothesis"), ("sentence1", "sentence2"), ("question", "passage")]
)
def test_a_second_text_is_refused_behind_columns_too(first: str, second: str) -> None:
    raw = {first: "a", second: "b", "label": 0}
    with pytest.raises(DataError, match=f"^field {second}: a second text"):
        convert(raw, columns={"text": first}, preference=Wanted("classes"))


def test_what_is_no_second_text_is_named_alone() -> None:
    raw = {"text": "a", "label": 0, "label_text": "negative", "sentence2": "", "text_length": 1, "comment": "b"}
    assert sorted(convert(raw, preference=Wanted("classes")).unused) == ["comment", "label_text", "text_length"]


USER, SYSTEM = {"role": "user", "content": "Where is my parcel? "}, {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Here."}


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, ANSWER, USER]])
def test_a_dialogue_that_ends_with_the_user_has_a_class(
    messages: list[JSON], load_judged: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """It is written as transformers does, without the beginning of an answer."""
    records: list[JSON] = [{"messages": messages, "label": 1}, {"conversations": messages, "label": 0}]
    dataset = load_judged(*records, wanted=Wanted("classes"))
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert [sample["input_ids"].tolist() for sample in dataset.samples] == [expected, expected]
    plain = load_judged(*records, wanted=Wanted("classes"), prompts=Prompts(PLAIN))
    text = tokenizer.decode(plain.samples[0]["input_ids"])
    assert text.endswith(f"### Instruction:\n{USER['content']}\n\n") and ("Here." in text) == (ANSWER in messages)


def test_of_others_a_dialogue_has_to_be_answered() -> None:
    for kind, more in (("marked", {"label": True}), ("classes", {"label": 1})):
        rounds = [["ask", "a"], ["ans", "b"], ["ask", "c"]]
        raw: JSON = {"messages": [USER]} if kind == "marked" else {"type": "conversation", "rounds": rounds}
        with pytest.raises(
            DataError, match=r"^field (messages: expected at least one of the a|rounds: expected an ans)"
        ):
            convert(raw | more, preference=Wanted(kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("raw", [{"instruction": "a", "input": "b"}, {"prompt": "a"}, {"question": "a"}])
def test_a_question_alone_is_refused_with_the_way_out(raw: JSON) -> None:
    name = next(iter(raw))
    with pytest.raises(
        DataError, match=rf"expected columns that name them, such as {{text: {name}}} for a text alone, or"
    ):
        convert(raw | {"label": 0}, preference=Wanted("classes"))


def test_the_input_of_an_instruction_is_a_second_text() -> None:
    raw = {"instruction": "a", "input": "b", "label": 0}
    with pytest.raises(DataError, match=r"^field input: a second text"):
        convert(raw, columns={"text": "instruction"}, preference=Wanted("classes"))
    assert convert(raw | {"input": ""}, columns={"text": "instruction"}, preference=Wanted("classes")).judged
