"""Global batches: a pure data order, equal shares, exact loss weights; and what a dataset counts and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from data.dataset import load_dataset, supervised_count
from data.errors import DataError
from data.loader import GlobalBatch, Loader
from data.tokenize import Sample, encode

TOPOLOGIES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (8, 1)]  # micro-batch size, replicas
INSTRUCT = {"type": "instruct", "instruct": "What is one?", "output": "1"}


def make_samples(count: int) -> list[Sample]:
    """Samples of 2 to 30 tokens; all ids of sample k are k + 1, its last tokens are supervised."""
    samples: list[Sample] = []
    for number in range(count):
        length = 2 + number * 11 % 29
        silent = 1 + number % (length - 1)
        labels = [-100] * silent + [number + 1] * (length - silent)
        samples.append({"input_ids": [number + 1] * length, "labels": labels})
    return samples


def members(batch: GlobalBatch) -> list[int]:
    return [number for replica in batch.micro_batches for micro_batch in replica for number in micro_batch]


def weights(loader: Loader, batch: GlobalBatch) -> tuple[float, float]:
    """What all supervised tokens, and all tokens, weigh in DeepSpeed's mean over micro-batches and replicas."""
    supervised = tokens = 0.0
    for replica in range(loader.replicas):
        for (_, positions), (labels, scale, share) in loader.tensors(batch, replica):
            supervised += float((labels[:, 1:] != -100).sum() * scale)
            tokens += float(share)
            assert float(share) * batch.tokens == pytest.approx(
                float((positions >= 0).sum()) * batch.n_micro_batches * loader.replicas
            )
    return supervised / (batch.n_micro_batches * loader.replicas), tokens / (batch.n_micro_batches * loader.replicas)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("micro_batch_size", "replicas"), TOPOLOGIES)
def test_every_sample_comes_once_an_epoch(micro_batch_size: int, replicas: int, drop_last: bool) -> None:
    loader = Loader(make_samples(37), 8, micro_batch_size, replicas, seed=1, drop_last=drop_last)
    assert loader.steps_per_epoch == (4 if drop_last else 5)
    for epoch in range(2):
        steps = range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch)
        seen = [number for step in steps for number in members(loader.batch(step))]
        assert len(seen) == len(set(seen)) == (32 if drop_last else 37)


@pytest.mark.parametrize(("micro_batch_size", "replicas"), TOPOLOGIES)
def test_the_samples_of_a_step_do_not_depend_on_the_processes(micro_batch_size: int, replicas: int) -> None:
    reference = Loader(make_samples(37), 8, 1, 1, seed=1)
    loader = Loader(make_samples(37), 8, micro_batch_size, replicas, seed=1)
    for step in (7, 0, 4, 9):  # in any order: a step does not depend on the ones before
        batch = loader.batch(step)
        assert sorted(members(batch)) == sorted(members(reference.batch(step)))
        assert (batch.tokens, batch.supervised) == (reference.batch(step).tokens, reference.batch(step).supervised)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        loader = Loader(make_samples(64), 1, 1, 1, seed)
        return [members(loader.batch(epoch * 64 + position))[0] for position in range(64)]

    orders = [order(seed, epoch) for seed in (1, 2) for epoch in (0, 1, 2)]
    assert order(1, 0) == orders[0]
    assert len({tuple(each) for each in orders}) == 6
    assert list(range(64)) not in orders


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 40), micro_batch_size=st.integers(1, 5), replicas=st.integers(1, 5), factor=st.integers(1, 4)
)
def test_the_tokens_of_a_global_batch_weigh_one(count: int, micro_batch_size: int, replicas: int, factor: int) -> None:
    loader = Loader(make_samples(count), micro_batch_size * replicas * factor, micro_batch_size, replicas, seed=3)
    for step in range(loader.steps_per_epoch):
        batch = loader.batch(step)
        assert {len(micro_batches) for micro_batches in batch.micro_batches} == {batch.n_micro_batches}
        assert all(len(numbers) <= micro_batch_size for replica in batch.micro_batches for numbers in replica)
        assert weights(loader, batch) == pytest.approx((1.0, 1.0), rel=1e-5)


def test_a_smaller_last_batch_is_shared_out_with_empty_micro_batches() -> None:
    loader = Loader(make_samples(9), 8, 1, 4, seed=0)
    batch = loader.batch(1)
    assert [len(numbers) for replica in batch.micro_batches for numbers in replica] == [1, 0, 0, 0]
    ((ids, positions), (labels, _, share)) = next(loader.tensors(batch, 3))
    assert ids.shape == positions.shape == labels.shape == (1, 8)
    assert (labels == -100).all()
    assert (positions < 0).all()
    assert share == 0


@pytest.mark.parametrize(("micro_batch_size", "replicas"), TOPOLOGIES)
def test_tensors_hold_the_samples_padded_to_multiples_of_eight(micro_batch_size: int, replicas: int) -> None:
    samples = make_samples(8)
    loader = Loader(samples, 8, micro_batch_size, replicas, seed=5)
    batch = loader.batch(0)
    for replica in range(replicas):
        for numbers, tensors in zip(batch.micro_batches[replica], loader.tensors(batch, replica), strict=True):
            (ids, positions), (labels, scale, share) = tensors
            longest = max(len(samples[number]["input_ids"]) for number in numbers)
            width = -(-longest // 8) * 8
            assert ids.shape == positions.shape == labels.shape == (len(numbers), width)
            assert ids.dtype == positions.dtype == labels.dtype == torch.int64
            assert scale.dtype == share.dtype == torch.float32
            assert (torch.where(positions < 0, -1 - positions, positions) == torch.arange(width)).all()
            for row, number in enumerate(numbers):
                length = len(samples[number]["input_ids"])
                assert ids[row, :length].tolist() == samples[number]["input_ids"]
                assert labels[row, :length].tolist() == samples[number]["labels"]
                assert (labels[row, length:] == -100).all()
                assert (positions[row, :length] >= 0).all()
                assert (positions[row, length:] < 0).all()


def test_a_batch_counts_its_tokens_without_padding() -> None:
    samples = make_samples(8)
    batch = Loader(samples, 8, 2, 2, seed=5).batch(0)
    assert batch.tokens == sum(len(sample["input_ids"]) for sample in samples)
    assert batch.supervised == sum(map(supervised_count, samples))


def test_an_epoch_without_a_whole_batch_is_refused() -> None:
    with pytest.raises(DataError, match="batch"):
        Loader(make_samples(7), 8, 1, 1, seed=0, drop_last=True)


def test_the_first_token_bears_no_loss_as_nothing_predicts_it() -> None:
    assert supervised_count({"input_ids": [5, 6, 7], "labels": [5, -100, 7]}) == 1


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def test_a_dataset_counts_what_was_cut_and_what_was_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    limit = len(encode(INSTRUCT, tokenizer, 1000, "plain")["input_ids"])
    long_answer, long_question = INSTRUCT | {"output": "1" * 50}, INSTRUCT | {"instruct": "one " * 200}
    path = write(tmp_path / "records.json", INSTRUCT, long_answer, long_question, {"type": "pretrain", "text": "1 2 3"})
    dataset = load_dataset(path, tokenizer, limit, "plain")
    assert (dataset.truncated, dataset.silent) == (2, 1)
    assert dataset.longest == len(encode(long_question, tokenizer, 10_000, "plain")["input_ids"])
    assert dataset.kinds == {"instruct": 3, "pretrain": 1}
    assert dataset.samples[1] == encode(long_answer, tokenizer, limit, "plain")
    summary = dataset.summary(limit)
    assert summary.startswith("3 samples (3 instruct, 1 pretrain), ")
    assert f"2 cut to max_seq_len {limit} (the longest had {dataset.longest} tokens)" in summary
    assert f"1 left out: nothing supervised in the first {limit} tokens" in summary
    assert "cut" not in load_dataset(path, tokenizer, 10_000, "plain").summary(10_000)


def test_a_dataset_without_any_loss_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "records.json", INSTRUCT)
    with pytest.raises(DataError, match=r"records\.json: nothing bears loss within max_seq_len 8"):
        load_dataset(path, tokenizer, 8, "plain")


def test_a_record_that_the_template_refuses_is_named_with_its_file(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = "{% if 'two' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}" + str(
        tokenizer.chat_template
    )
    first = write(tmp_path / "a.json", INSTRUCT)
    second = write(tmp_path / "b.json", INSTRUCT, INSTRUCT | {"instruct": "two"})
    with pytest.raises(DataError) as caught:
        load_dataset([first, second], tokenizer, 1000, "chat_template")
    assert str(caught.value).startswith(f"{second}: record 2: the chat template refuses the record: no")
