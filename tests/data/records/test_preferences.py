"""Preference records: every layout gives the same pair, only the answers are trained, and both are cut together."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from data.chat.prompts import Prompts
from data.errors import DataError
from data.inspection.inspect import documents, show_samples, write_page
from data.inspection.summary import table, warnings
from data.records.formats import convert
from data.records.record import type_of
from data.sample_set import Sample
from data.settings import Truncate, Wanted
from data.tokenized.columns import OLDEST
from data.tokenized.recipe import Recipe
from data.tokenized.tokenize import encode
from tests.data.caches import JUDGED_LIMIT, caches
from tests.data.helpers import FIELDS, as_lists, runs_of, supervised, whole_text
from tests.data.records.test_judged_sets import refusal

JSON = dict[str, Any]
PAIRS, MARKED, CLASSES = Wanted("pairs"), Wanted("marked"), Wanted("classes")
PROMPTS = Prompts("chat_template")
LIMIT = JUDGED_LIMIT
CLASS_NAMES = ("desirable", "undesirable")


def user(text: str) -> JSON:
    return {"role": "user", "content": text}


def said(text: str) -> JSON:
    return {"role": "assistant", "content": text}


def human(text: str) -> JSON:
    return {"from": "human", "value": text}


def gpt(text: str) -> JSON:
    return {"from": "gpt", "value": text}


Q, GOOD, BAD = "What is 1?", "A number.", "A word."
BEFORE = [user("Hi"), said("Hello!")]
TALK = [*BEFORE, user(Q)]
SYSTEM = {"role": "system", "content": "Be brief."}
HH = "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: What is 1?\n\nAssistant: "
ONE_TURN: dict[str, JSON] = {
    "trl, explicit, texts": {"prompt": Q, "chosen": GOOD, "rejected": BAD},
    "trl, explicit, messages": {"prompt": [user(Q)], "chosen": [said(GOOD)], "rejected": [said(BAD)]},
    "trl, implicit": {"chosen": [user(Q), said(GOOD)], "rejected": [user(Q), said(BAD)]},
    "UltraFeedback": {
        "prompt": Q,
        "prompt_id": "0",
        "chosen": [user(Q), said(GOOD)],
        "rejected": [user(Q), said(BAD)],
        "messages": [user(Q), said(GOOD)],
        "score_chosen": 8.5,
        "score_rejected": 6.0,
    },
    "whole dialogues beside their prompt": {
        "messages": [user(Q)],
        "chosen": [user(Q), said(GOOD)],
        "rejected": [user(Q), said(BAD)],
    },
    "HH-RLHF": {
        "chosen": f"\n\nHuman: {Q}\n\nAssistant: {GOOD}",
        "rejected": f"\n\nHuman: {Q}\n\nAssistant: {BAD}",
    },
    "LLaMA-Factory, ShareGPT": {"conversations": [human(Q)], "chosen": gpt(GOOD), "rejected": gpt(BAD)},
    "LLaMA-Factory, Alpaca": {"instruction": Q, "input": "", "chosen": GOOD, "rejected": BAD},
    "LLaMA-Factory, Alpaca with an empty output": {"instruction": Q, "output": "", "chosen": GOOD, "rejected": BAD},
    "axolotl, chat_template": {"messages": [user(Q)], "chosen": said(GOOD), "rejected": said(BAD)},
    "axolotl, chatml.intel": {"system": "", "question": Q, "chosen": GOOD, "rejected": BAD},
    "axolotl, chatml.argilla": {"instruction": Q, "chosen_response": GOOD, "rejected_response": BAD},
    "axolotl, chatml.icr": {"input": Q, "chosen": GOOD, "rejected": BAD},
    "OpenAI": {
        "input": {"messages": [user(Q)], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [said(GOOD)],
        "non_preferred_output": [said(BAD)],
    },
    "ms-swift, an answer": {"messages": [user(Q), said(GOOD)], "rejected_response": BAD},
    "ms-swift, messages": {"messages": [user(Q), said(GOOD)], "rejected_messages": [user(Q), said(BAD)]},
    "ms-swift, older": {"query": Q, "response": GOOD, "rejected_response": BAD},
    "ranked, scores": {"prompt": Q, "responses": [BAD, GOOD], "scores": [1, 3.5]},
    "ranked, ranks": {"prompt": Q, "completions": [GOOD, BAD], "ranks": [1, 2]},
    "ranked, entries": {
        "instruction": Q,
        "completions": [{"response": GOOD, "overall_score": 9}, {"response": BAD, "overall_score": 6}],
    },
}
SEVERAL_TURNS: dict[str, JSON] = {
    "trl, explicit": {"prompt": TALK, "chosen": [said(GOOD)], "rejected": [said(BAD)]},
    "trl, implicit": {"chosen": [*TALK, said(GOOD)], "rejected": [*TALK, said(BAD)]},
    "HH-RLHF": {"chosen": HH + GOOD, "rejected": HH + BAD},
    "LLaMA-Factory, ShareGPT": {
        "conversations": [human("Hi"), gpt("Hello!"), human(Q)],
        "chosen": gpt(GOOD),
        "rejected": gpt(BAD),
    },
    "LLaMA-Factory, Alpaca": {"instruction": Q, "history": [["Hi", "Hello!"]], "chosen": GOOD, "rejected": BAD},
    "axolotl": {"messages": TALK, "chosen": said(GOOD), "rejected": said(BAD)},
    "OpenAI": {
        "input": {"messages": TALK},
        "preferred_output": [said(GOOD)],
        "non_preferred_output": [said(BAD)],
    },
    "ms-swift": {"messages": [*TALK, said(GOOD)], "rejected_response": BAD},
    "ranked": {"messages": TALK, "responses": [GOOD, BAD], "scores": [2, 1]},
}
MARKED_GOOD: dict[str, JSON] = {
    "trl": {"prompt": Q, "completion": GOOD, "label": True},
    "trl, messages": {"prompt": [user(Q)], "completion": [said(GOOD)], "label": True},
    "messages": {"messages": [user(Q), said(GOOD)], "label": 1},
    "LLaMA-Factory": {"instruction": Q, "output": GOOD, "kto_tag": True},
    "LLaMA-Factory, ShareGPT": {"conversations": [human(Q), gpt(GOOD)], "kto_tag": "true"},
    "axolotl, argilla": {"instruction": Q, "completion": GOOD, "label": True},
    "axolotl, intel": {"system": "", "question": Q, "completion": GOOD, "label": True},
    "ms-swift": {"messages": [user(Q), said(GOOD)], "label": "True"},
    "several turns": {"messages": [*TALK, said(GOOD)], "label": True},
}


@pytest.fixture
def load(load_judged: Any) -> Any:
    return load_judged


def listed(sample: Sample) -> Sample:
    return as_lists(sample) | {name: sample[name] for name in ("first", "value") if name in sample}  # type: ignore


def halves(sample: Sample) -> list[Sample]:
    return [document for _, document in documents(listed(sample))]


def check_pair(sample: Sample, prompt: list[JSON], tokenizer: PreTrainedTokenizerBase) -> None:
    """Each document is what plain training makes of the dialogue, and of it only the last answer is trained."""
    for half, words in zip(halves(sample), (GOOD, BAD), strict=True):
        plain = [each | ({"weight": 0} if each["role"] == "assistant" else {}) for each in prompt]
        assert half == encode({"messages": [*plain, said(words)]}, tokenizer, 1000, PROMPTS)
        assert supervised(runs_of(half, tokenizer)) == [f"{words}<|im_end|>"]


@pytest.mark.parametrize("name", ONE_TURN)
def test_a_pair_in_any_layout(name: str, load: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    dataset = load(ONE_TURN[name])
    (sample,) = dataset.samples
    check_pair(sample, [user(Q)], tokenizer)
    margins = {"UltraFeedback": 2.5, "ranked, scores": 2.5, "ranked, entries": 3.0}
    assert dataset.values.tolist() == [margins.get(name, 0.0)]
    assert not {*dataset.unused} - {"parallel_tool_calls", "prompt_id"}
    assert dataset.types == ["pair"]


@pytest.mark.parametrize("name", SEVERAL_TURNS)
def test_earlier_answers_are_the_prompt(name: str, load: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    (sample,) = load(SEVERAL_TURNS[name]).samples
    check_pair(sample, TALK, tokenizer)


def test_a_system_message_is_part_of_both_prompts(load: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    for raw in (
        {"system": "Be brief.", "question": Q, "chosen": GOOD, "rejected": BAD},
        {"messages": [SYSTEM, user(Q)], "chosen": said(GOOD), "rejected": said(BAD)},
        {"prompt": [SYSTEM, user(Q)], "chosen": [said(GOOD)], "rejected": [said(BAD)]},
    ):
        check_pair(load(raw).samples[0], [SYSTEM, user(Q)], tokenizer)


def test_names_of_a_files_own(load: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    record = convert(
        {"q": Q, "better": GOOD, "worse": BAD, "judge": "x"},
        columns={"prompt": "q", "chosen": "better", "rejected": "worse"},
        preference=PAIRS,
    )
    (judged,) = record.judged
    assert [getattr(each, "output", None) for each in judged.documents] == [GOOD, BAD]
    assert record.unused == ["judge"] and record.columns == ["q", "better", "worse"]


def test_the_columns_count_both_documents(load: Any) -> None:
    dataset = load(ONE_TURN["trl, implicit"] | {"margin": 0.25}, SEVERAL_TURNS["HH-RLHF"])
    for number, sample in enumerate(map(listed, dataset.samples)):
        counts = [sum(label != -100 for label in half["labels"][1:]) for half in halves(sample)]
        assert dataset.lengths[number] == len(sample["input_ids"])
        assert dataset.first[number] == sample["first"] == len(halves(sample)[0]["input_ids"])
        assert (dataset.first_supervised[number], dataset.supervised[number]) == (counts[0], sum(counts))
    assert dataset.values.tolist() == [0.25, 0.0]
    assert dataset.values.dtype == numpy.float32
    again = dataset.select([1, 0, 1])
    assert again.first.tolist() == dataset.first[[1, 0, 1]].tolist()
    assert again.values.tolist() == [0.0, 0.25, 0.0]


def test_answers_of_several_turns_are_trained_from_where_they_differ(
    load: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    chosen, rejected = [*TALK, said(GOOD), user("Sure?"), said("Yes.")], [*TALK, said(BAD), user("Sure?"), said("No.")]
    (sample,) = load({"chosen": chosen, "rejected": rejected}).samples
    trained = [supervised(runs_of(half, tokenizer)) for half in halves(sample)]
    assert trained == [[f"{GOOD}<|im_end|>", "Yes.<|im_end|>"], [f"{BAD}<|im_end|>", "No.<|im_end|>"]]


def test_a_pair_of_token_ids_is_trained_as_its_labels_say(load: Any) -> None:
    chosen, rejected = ({"input_ids": [5, 6, *more], "labels": [-100, 6, *more]} for more in ([7, 8], [9]))
    (sample,) = map(listed, load({"chosen": chosen, "rejected": rejected, "margin": 2}).samples)
    assert sample == {
        "input_ids": [5, 6, 7, 8, 5, 6, 9],
        "labels": [-100, 6, 7, 8, -100, 6, 9],
        "first": 4,
        "value": 2.0,
    }
    assert "prompt" in refusal({"prompt": Q, "chosen": chosen, "rejected": rejected})
    assert "rejected" in refusal({"chosen": chosen, "rejected": {"input_ids": []}})
    assert "expected a prompt beside it" in refusal({"chosen": chosen, "rejected": BAD})


def test_a_ranked_list_is_its_best_answer_against_each_worse_one(load: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    dataset = load({"prompt": Q, "responses": ["b", "best", "equal", "c"], "scores": [2, 4, 4, 1]})
    pairs = [[supervised(runs_of(half, tokenizer))[0] for half in halves(sample)] for sample in dataset.samples]
    assert pairs == [[f"best{end}", f"{worse}{end}"] for end in ("<|im_end|>",) for worse in ("b", "c")]
    assert dataset.values.tolist() == [2.0, 3.0]
    assert "scores: expected answers of different grades" in refusal(
        {"prompt": Q, "responses": ["a", "b"], "scores": [1, 1]}
    )
    assert "ranks: expected a number for each of" in refusal({"prompt": Q, "responses": ["a", "b"], "ranks": [1]})


def test_both_documents_are_cut_together(load: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """One short and one long answer: of both the same turns are left out, although one would do with fewer."""
    words = [f"{number}: " + "word " * 20 for number in range(8)]
    turns = [(user, said)[number % 2](text) for number, text in enumerate(words)]
    short, long = "short", "long " * 30
    raw = {"prompt": [SYSTEM, *turns, user(Q)], "chosen": [said(short)], "rejected": [said(long)]}
    dataset = load(raw, how="oldest", limit=LIMIT // 2)
    (sample,) = dataset.samples
    texts = [whole_text(runs_of(half, tokenizer)) for half in halves(sample)]
    assert texts[0].partition(short)[0] == texts[1].partition(long.strip())[0]
    assert "0: " not in texts[0] and Q in texts[0] and "Be brief." in texts[0]
    assert max(len(half["input_ids"]) for half in halves(sample)) <= LIMIT // 2
    assert len(halves(sample)[0]["input_ids"]) < LIMIT // 4, "the short one would have kept more"
    assert [note for note, *_ in dataset.notes] == [OLDEST]
    assert dataset.total.cut == 0

    with pytest.raises(DataError, match=r"a.jsonl: record 1: [\d,]+ tokens; expected at most max_seq_len, 160"):
        load(raw, how="refuse", limit=LIMIT // 2)


def test_turns_in_which_answers_differ_stay(load: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Else one answer would follow what another one said."""
    begin = [user("0: " + "word " * 20), said("word " * 20), user("1: " + "word " * 20)]
    answers = [[said(f"{name} " * 20), user("2: Sure?"), said(f"{name} " * 20)] for name in ("good", "bad")]
    dataset = load({"chosen": begin + answers[0], "rejected": begin + answers[1]}, how="oldest", limit=200)
    for half in halves(dataset.samples[0]):
        text = whole_text(runs_of(half, tokenizer))
        assert "0: " not in text and "1: " in text and len(half["input_ids"]) <= 200


def test_answers_are_cut_at_the_same_limit(load: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    raw = {"prompt": Q, "chosen": "good " * 100, "rejected": "bad " * 100}
    dataset = load(raw, limit=64)
    (sample,) = dataset.samples
    assert [len(half["input_ids"]) for half in halves(sample)] == [64, 64]
    assert dataset.total.cut == 1 and dataset.total.longest > 100


@pytest.mark.parametrize("how", ["turns", "oldest"])
def test_a_pair_without_a_trained_token_in_one_of_its_documents_is_counted(how: Truncate, load: Any) -> None:
    dataset = load(ONE_TURN["OpenAI"], {"prompt": "word " * 100, "chosen": GOOD, "rejected": BAD}, limit=64, how=how)
    assert (len(dataset), dataset.total.silent, dataset.total.cut) == (1, 1, 1)
    assert any("50% of the records are left out" in line for line in warnings(dataset, 64))


def test_equal_answers_are_counted(load: Any) -> None:
    equal = {"prompt": Q, "chosen": GOOD, "rejected": GOOD}
    cut = {"prompt": Q, "chosen": "word " * 99 + "a", "rejected": "word " * 99 + "b"}
    dataset = load(
        ONE_TURN["OpenAI"], equal, {"chosen": [*TALK, said(GOOD)], "rejected": [*TALK, said(GOOD)]}, cut, limit=64
    )
    assert (len(dataset), dataset.total.equal, dataset.total.silent) == (1, 3, 0)
    assert "3 pairs left out, as both answers are equal within max_seq_len" in warnings(dataset, 64)
    assert table(dataset).splitlines()[1].split()[-2:] == ["3", "0"]


def test_empty_answers_are_counted(load: Any) -> None:
    dataset = load({"prompt": Q, "chosen": GOOD, "rejected": [said("")]}, {"prompt": Q, "chosen": "", "rejected": BAD})
    assert (len(dataset), dataset.total.empty) == (2, 2)
    assert any("2 records have an empty answer" in line for line in warnings(dataset, LIMIT))


def test_a_prompt_alone_counts_for_nothing(load: Any) -> None:
    with pytest.raises(DataError, match="mask: a preference is one of answers"):
        load(ONE_TURN["OpenAI"], prompts=Prompts("chat_template", mask="all"))


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (
            {"prompt": Q, "completion": GOOD},
            "field rejected: expected chosen and rejected answers, or columns that name",
        ),
        ({"prompt": Q, "chosen": GOOD}, "field rejected: expected chosen and rejected answers"),
        ({"prompt": Q, "rejected": BAD}, "field rejected: expected a good answer beside it, as chosen"),
        (
            {"prompt": Q, "chosen": GOOD, "rejected": 7},
            "field rejected: expected a text, a message or a list of messages",
        ),
        ({"prompt": Q, "chosen": GOOD, "rejected": []}, "field rejected: expected a text, a message or a list"),
        ({"prompt": Q, "chosen": GOOD, "rejected": None}, "field rejected: expected chosen and rejected answers"),
        ({"chosen": GOOD, "rejected": BAD}, "field chosen: expected a prompt beside it, or the whole dialogue"),
        ({"messages": [*TALK, said("x")], "chosen": GOOD, "rejected": BAD}, "field messages: expected a list of mess"),
        ({"messages": "x", "chosen": GOOD, "rejected": BAD}, "field messages: expected a list of messages up to the"),
        (
            {"prompt": Q, "completion": "x", "chosen": GOOD, "rejected": BAD},
            "field completion: expected no third answer",
        ),
        ({"prompt": Q, "chosen": GOOD, "rejected": [said("a") | {"weight": 2}]}, "rejected: field "),
        (
            {"prompt": Q, "chosen": GOOD, "rejected": BAD, "images": ["a.png"]},
            "chosen: images: 1 image, but 0 places",
        ),
        (
            {"chosen": [user("A?"), said(GOOD)], "rejected": [user("B?"), said(BAD)]},
            "field rejected: expected another answer to the same messages as chosen",
        ),
        (
            {"messages": [user("B?")], "chosen": [user(Q), said(GOOD)], "rejected": [user(Q), said(BAD)]},
            "field messages: expected the beginning of chosen, or none beside whole dialogues",
        ),
        ({"prompt": Q, "response_a": "a", "response_b": "b"}, "field rejected: expected chosen and rejected answers"),
    ],
)
def test_bad_pairs_are_refused_in_one_line(raw: JSON, line: str) -> None:
    assert refusal(raw).startswith(line)


def test_bad_pairs_can_be_left_out(load: Any) -> None:
    dataset = load(ONE_TURN["OpenAI"], {"prompt": Q, "completion": GOOD}, on_bad_record="skip")
    assert len(dataset) == dataset.n_bad == 1
    assert "a.jsonl: record 2: field rejected: expected chosen and rejected" in dataset.skipped[0]


def test_grades_that_are_not_used_are_named() -> None:
    raw = ONE_TURN["trl, implicit"] | {"chosen_rating": 5, "rejected_model": "m", "chosen_score": 2}
    assert sorted(convert(raw, preference=PAIRS).unused) == ["chosen_rating", "chosen_score", "rejected_model"]


def test_without_the_key_a_cache_has_the_name_that_it_had() -> None:
    """A stream's checkpoint holds a digest of what was asked for."""
    plain = Recipe((), "", Prompts("plain"), 100)
    assert replace(plain, preference=None).settings_digest([]) == plain.settings_digest([])
    assert replace(plain, preference=PAIRS).settings_digest([]) != plain.settings_digest([])


def test_without_the_key_preferences_are_refused_as_ever(load: Any) -> None:
    with pytest.raises(
        DataError, match=r"preference data \(fields chosen, rejected\): expected the key preference, or"
    ):
        load(ONE_TURN["trl, implicit"], wanted=None)


def test_caches_differ_by_what_is_wanted(load: Any, tmp_path: Path) -> None:
    record = {"prompt": Q, "completion": GOOD, "label": 1}
    other = {"prompt": Q, "completion": GOOD, "label": 0}
    sets = [load(record, other, wanted=wanted) for wanted in (MARKED, CLASSES, Wanted("classes", ("a", "b")))]
    assert len(caches(tmp_path)) == 3
    assert [each.values.tolist() for each in sets] == [[1, 0], [1, 0], [1, 0]]
    digests = sets[0].digests.tolist()
    assert digests[0] != digests[1], "what a sample is trained towards is part of it"
    assert load(record, other, wanted=MARKED).fingerprint() == sets[0].fingerprint() != sets[1].fingerprint()


def test_inspect_shows_both_documents_of_a_pair(load: Any, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    dataset = load(ONE_TURN["UltraFeedback"])
    printed = StringIO()
    show_samples(dataset.samples[:1], tokenizer, Console(file=printed, width=200))
    lines = printed.getvalue().splitlines()
    halves_of = [len(half["input_ids"]) for half in halves(dataset.samples[0])]
    assert f"sample 1: chosen {halves_of[0]} tokens" in lines[0] and f"rejected {halves_of[1]} tokens" in lines[0]
    assert "value 2.5" in lines[0]
    chosen = next(place for place, line in enumerate(lines) if line.startswith("chosen -"))
    rejected = next(place for place, line in enumerate(lines) if line.startswith("rejected -"))
    assert any(f"⟦{GOOD}<|im_end|>" in line for line in lines[chosen:rejected])
    assert any(f"⟦{BAD}<|im_end|>" in line for line in lines[rejected:])
    write_page(dataset.samples[:1], tokenizer, tmp_path / "page.html", "t")
    page = (tmp_path / "page.html").read_text()
    assert page.index("<h3>chosen</h3>") < page.index("<h3>rejected</h3>") and page.count("<pre") == 2


def test_a_plain_record_is_of_its_own_type() -> None:
    (record,) = convert({"prompt": Q, "completion": GOOD}).records
    assert type_of(record) == "instruct"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("role from content value text score messages".split()), inner, max_size=3)
    ),
    max_leaves=6,
)


def test_a_field_inside_of_another_is_no_second_text() -> None:
    pair = {"prompt": "What is 1?", "chosen": "A number.", "rejected": "A word.", "input": {"content": False}}
    converted = convert(pair, preference=PAIRS)
    assert len(converted.judged) == 1 and "content" in converted.unused


@settings(max_examples=300, deadline=None)
@given(
    record=st.sampled_from([*ONE_TURN.values(), *SEVERAL_TURNS.values(), *MARKED_GOOD.values()]),
    changes=st.dictionaries(
        st.sampled_from(sorted(FIELDS | {"messages", "prompt", "input", "output", "type"})), JSON_VALUES, max_size=2
    ),
    wanted=st.sampled_from([PAIRS, MARKED, CLASSES]),
)
def test_any_object_is_taken_or_refused_in_one_line(record: JSON, changes: JSON, wanted: Wanted) -> None:
    before = json.dumps(record | changes)
    raw = json.loads(before)
    try:
        converted = convert(raw, preference=wanted)
    except DataError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert converted.judged and not converted.records
        assert {len(each.documents) for each in converted.judged} == {2 if wanted == PAIRS else 1}
        assert all(numpy.isfinite(numpy.float32(each.value)) for each in converted.judged)
    assert json.dumps(raw) == before, "what was read stays as it is"
