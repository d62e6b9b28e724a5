"""A run's samples: the same as encoding record by record, counted, mixed, reported."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from data.errors import DataError
from data.inspection import summary
from data.inspection.summary import draw_lengths
from data.sample_set import supervised_count
from data.settings import Source
from data.tokenized.columns import has_empty_answer
from data.tokenized.dataset import Dataset
from data.tokenized.loading import load_dataset
from data.tokenized.tokenize import encode, encode_tokens
from tests.conftest import CHATML, save_tokenizer
from tests.data.helpers import RECORDS, as_lists, parse_record
from training.batches import build_loader
from training.config.keys import TrainConfig

INSTRUCT = {"type": "instruct", "instruct": "What is one?", "output": "1"}


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


@pytest.mark.parametrize("prompt_format", ["plain", "gdgpt", "chat_template"])
def test_the_samples_are_those_of_encoding_one_by_one(
    tmp_path: Path, tokenizer_folder: Path, tokenizer: PreTrainedTokenizerBase, prompt_format: str
) -> None:
    path = write(tmp_path / "records.json", *RECORDS.values())
    dataset = load_dataset(path, tokenizer_folder, 10_000, prompt_format)
    wanted = [encode_tokens(record, tokenizer, prompt_format).sample() for record in RECORDS.values()]
    assert [as_lists(sample) for sample in dataset.samples] == wanted
    types = [record["type"] for record in RECORDS.values()]
    assert dataset.types == sorted(set(types))
    assert all(dataset.of_type(kind).tolist() == [kind == each for each in types] for kind in dataset.types)
    assert dataset.lengths.tolist() == [len(sample["input_ids"]) for sample in wanted]
    assert dataset.supervised.tolist() == [supervised_count(sample) for sample in wanted]
    assert [dataset.origin(number) for number in (0, 3)] == [f"{path}: record 1", f"{path}: record 4"]
    assert dataset.samples[-1]["input_ids"].dtype == numpy.int32  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        dataset.samples[len(wanted)]


def test_a_dataset_counts_what_was_cut_and_what_was_left_out(
    tmp_path: Path, tokenizer_folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    limit = len(encode(INSTRUCT, tokenizer, 1000, "plain")["input_ids"])
    long_answer, long_question = INSTRUCT | {"output": "1" * 50}, INSTRUCT | {"instruct": "one " * 200}
    path = write(tmp_path / "records.json", INSTRUCT, long_answer, long_question, {"type": "pretrain", "text": "1 2 3"})
    dataset = load_dataset(path, tokenizer_folder, limit, "plain")
    assert (dataset.total.cut, dataset.total.silent) == (2, 1)
    assert dataset.total.longest == len(encode(long_question, tokenizer, 10_000, "plain")["input_ids"])
    assert {kind: tally.records for (_, kind), tally in dataset.tallies.items()} == {"instruct": 3, "pretrain": 1}
    assert as_lists(dataset.samples[1]) == encode(long_answer, tokenizer, limit, "plain")
    assert dataset.origin(2) == f"{path}: record 4"
    told = summary.facts(dataset, limit)
    assert told[0].startswith("an epoch: 3 samples, ")
    cut = f"cut to max_seq_len {limit}: 2 records, 0 of them at the end of a turn; the longest had "
    assert told[-1] == f"{cut}{dataset.total.longest:,} tokens"
    rows = [row.split() for row in summary.table(dataset).splitlines()]
    columns = list(summary.COLUMNS)
    left_out = {row[1]: row[columns.index("left out")] for row in rows[1:3]}
    assert left_out == {"instruct": "1", "pretrain": "0"}
    whole = load_dataset(path, tokenizer_folder, 10_000, "plain")
    assert not any("cut" in line for line in summary.facts(whole, 10_000))


def test_records_without_a_trained_token_are_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = write(tmp_path / "records.json", INSTRUCT)
    with pytest.raises(DataError, match=r"records\.json: no token is trained within max_seq_len 8"):
        load_dataset(path, tokenizer_folder, 8, "plain")


def test_a_record_that_the_template_refuses_is_named_with_its_file(tmp_path: Path) -> None:
    template = "{% if 'two' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}" + CHATML
    (tmp_path / "tokenizer").mkdir()
    save_tokenizer(tmp_path / "tokenizer", template)
    first = write(tmp_path / "a.json", INSTRUCT)
    second = write(tmp_path / "b.json", INSTRUCT, INSTRUCT | {"instruct": "two"})
    with pytest.raises(DataError) as caught:
        load_dataset([first, second], tmp_path / "tokenizer", 1000, "chat_template")
    assert str(caught.value).startswith(f"{second}: record 2: the chat template refuses the record: no")


def test_bad_records_are_all_named_or_left_out(tmp_path: Path, tokenizer_folder: Path) -> None:
    bad = INSTRUCT | {"instruct": 7}
    path = write(tmp_path / "records.json", INSTRUCT, bad, *[INSTRUCT] * 600, bad)
    with pytest.raises(DataError) as caught:
        load_dataset(path, tokenizer_folder, 1000, "plain")
    line, last = str(caught.value).splitlines()
    assert line.startswith(f"{path}: records 2, 603: field instruct: ") and last == "2 bad records"
    dataset = load_dataset(path, tokenizer_folder, 1000, "plain", on_bad_record="skip")
    assert (len(dataset), dataset.n_bad) == (601, 2)
    assert dataset.origin(1) == f"{path}: record 3"
    assert "records 2, 603" in "\n".join(dataset.skipped)
    assert "2 bad records are left out (on_bad_record: skip)" in summary.warnings(dataset, 1000)


def test_a_mixture_repeats_and_thins_out(tmp_path: Path, tokenizer_folder: Path) -> None:
    first = write(tmp_path / "a.json", *[INSTRUCT | {"output": str(number)} for number in range(4)])
    second = write(tmp_path / "b.json", *[INSTRUCT | {"output": f"b{number}"} for number in range(10)])
    sources = [Source(path=str(first), repeat=2), Source(path=str(second), repeat=0.5)]
    dataset = load_dataset(sources, tokenizer_folder, 1000, "plain", seed=3)
    origins = [dataset.origin(number) for number in range(len(dataset))]
    assert origins[:8] == [f"{first}: record {number}" for number in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert len(set(origins[8:])) == len(origins[8:]) == 5
    assert len(dataset.lengths) == len(dataset.supervised) == len(dataset.samples) == 13
    plain = load_dataset([first, second], tokenizer_folder, 1000, "plain")
    assert plain.folder == dataset.folder  # nothing is tokenized for another mixture
    assert dataset.fingerprint() != plain.fingerprint()
    assert as_lists(dataset.samples[8]) == as_lists(plain.samples[plain_number(plain, origins[8])])
    assert plain.duplicates == 0  # a mixture's repeats are none
    last = dataset.select([12, 0])
    assert [last.origin(number) for number in (0, 1)] == [origins[12], origins[0]]
    assert last.lengths.tolist() == dataset.lengths[[12, 0]].tolist()


def plain_number(dataset: Dataset, origin: str) -> int:
    return [dataset.origin(number) for number in range(len(dataset))].index(origin)


def test_samples_survive_pickling_and_forking(tmp_path: Path, tokenizer_folder: Path) -> None:
    dataset = load_dataset(write(tmp_path / "records.json", *RECORDS.values()), tokenizer_folder, 1000, "plain")
    wanted = [as_lists(sample) for sample in dataset.samples]
    for samples in (dataset.samples, dataset.select([2, 1]).samples):
        again = pickle.loads(pickle.dumps(samples))
        assert [as_lists(sample) for sample in again] == [as_lists(sample) for sample in samples]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(dataset.samples.__getitem__, range(3))[2]["labels"].tolist() == wanted[2]["labels"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("record", "empty"),
    [
        (INSTRUCT, False),
        (INSTRUCT | {"output": " \n"}, True),
        ({"type": "conversation", "rounds": [["ask", "1?"], ["ans", "1"], ["ask", "2?"], ["ans", ""]]}, True),
        ({"type": "conversation", "rounds": [["ask", ""], ["ans", "1"]]}, False),
        (RECORDS["api_param as an object"], False),
        ({"type": "pretrain", "text": " "}, False),
    ],
)
def test_empty_answers_are_found(record: dict[str, Any], empty: bool) -> None:
    assert has_empty_answer(parse_record(record)) is empty


def test_the_report_names_cut_empty_and_duplicate_records(tmp_path: Path, tokenizer_folder: Path) -> None:
    unlike = [INSTRUCT | {"instruct": f"What is {number}?"} for number in range(5)]
    unlike.append(INSTRUCT | {"instruct": "What is <|im_end|>?"})
    empty, long = INSTRUCT | {"output": ""}, INSTRUCT | {"output": "1 2 3 4 5 " * 100}
    path = write(tmp_path / "train.json", *unlike, unlike[0], empty, long, long | {"instruct": "What is long?"})
    held_out = write(tmp_path / "eval.json", unlike[3], INSTRUCT | {"instruct": "What is new?"})
    limit = 200
    dataset = load_dataset(path, tokenizer_folder, limit, "plain")
    evaluation_set = load_dataset(held_out, tokenizer_folder, limit, "plain")
    keys = {"model_path": "m", "data_path": "d", "save_path": str(tmp_path), "train_batch_size": 4, "packing": False}
    config = TrainConfig.model_validate(keys | {"max_seq_len": limit})
    with open(tmp_path / "log", "w", encoding="utf-8") as file:
        log = Console(file=file, soft_wrap=True)
        loader = build_loader(dataset, config)
        summary.report(dataset, evaluation_set, loader, config.max_seq_len, tmp_path, log)
    told = (tmp_path / "log").read_text(encoding="utf-8")
    for part in (
        "train.json  instruct       10       10",
        "an epoch: 10 samples",
        "duplicates: 1 samples equal an earlier one",
        "packing: off, each sample has a row of its own; ",
        "warning: 20% of the records are cut: raise max_seq_len, now 200; the longest record has",
        "warning: 10% of the samples are exact duplicates",
        "warning: 1 records have an empty answer",
        "warning: 1 records have the name of a control token in their words",
        "warning: 1 of 2 samples of the evaluation data are trained on too",
    ):
        assert part in told
    assert (tmp_path / summary.LENGTHS_FILE).read_bytes().startswith(b"\x89PNG")


def test_good_records_give_no_warning(tmp_path: Path, tokenizer_folder: Path) -> None:
    unlike = [INSTRUCT | {"instruct": f"What is {number}?", "output": "One. " * 20} for number in range(6)]
    dataset = load_dataset(write(tmp_path / "a.json", *unlike[:5]), tokenizer_folder, 1000, "plain")
    other = load_dataset(write(tmp_path / "b.json", unlike[5]), tokenizer_folder, 1000, "plain")
    assert summary.warnings(dataset, 1000) == []
    assert summary.overlap(dataset, other) == []


@pytest.mark.parametrize(("word", "escaped"), [("<image>", False), ("<image>", True), ("<ref-object>", False)])
def test_a_placeholder_of_a_picture_is_noted_with_its_place(
    word: str, escaped: bool, tmp_path: Path, tokenizer_folder: Path
) -> None:
    unlike = [INSTRUCT | {"instruct": f"What is {number}?", "output": "One. " * 20} for number in range(4)]
    unlike[1]["instruct"] = unlike[3]["output"] = f"{word}\nWhat is it? <img> <Image>"
    path = write(tmp_path / "a.jsonl", *unlike)
    if escaped:
        path.write_text(path.read_text(encoding="utf-8").replace("<", "\\u003c"), encoding="utf-8")
    (told,) = summary.warnings(load_dataset(path, tokenizer_folder, 1000, "plain"), 1000)
    assert told.startswith("2 records: hold a placeholder such as <image>, which is trained as text")
    assert f"such as {word} in {path}: record " in told


def test_comments_and_commas_that_were_passed_over_are_told(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a http://b // c"}, {"text": "d",}, // e\n {"text": "f"}]', encoding="utf-8")
    dataset = load_dataset(path, tokenizer_folder, 1000, "plain")
    assert len(dataset) == 3
    (told,) = summary.warnings(dataset, 1000)
    what = "have comments, or commas before a closing bracket, which are no JSON and were passed over"
    assert told == f"2 records: {what}; such as {path}: record 2"


def test_many_files_do_not_flood_the_table(tmp_path: Path, tokenizer_folder: Path) -> None:
    paths = [write(tmp_path / f"{number}.json", INSTRUCT | {"output": str(number)}) for number in range(25)]
    lines = summary.table(load_dataset(paths, tokenizer_folder, 1000, "plain")).splitlines()
    assert len(lines) == 1 + summary.ROWS + 2
    assert lines[-2].split()[:4] == ["5", "more", "5", "5"]
    assert lines[-1].split()[:3] == ["together", "25", "25"]


def test_the_lengths_of_a_single_sample_can_be_drawn(tmp_path: Path, tokenizer_folder: Path) -> None:
    dataset = load_dataset(write(tmp_path / "records.json", INSTRUCT), tokenizer_folder, 1000, "plain")
    assert draw_lengths(dataset, 1000, tmp_path / "lengths.png").stat().st_size > 1000
