"""Answers to other prompts: no prompt meets one of its own, each answer is used once, and batches change nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.images.image import Image
from data.sample_set import InMemory, Sample, trained_count
from options.preference.mismatch import Mismatched


def single(prompt: list[int], answer: list[int], value: float = 1.0) -> Sample:
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer, "value": value}


def of_prompts(prompts: list[int]) -> list[Sample]:
    """A sample for each prompt, all answers different; some are one token long."""
    return [single([prompt] * (1 + prompt % 3), [100 + n] * (1 + n % 4)) for n, prompt in enumerate(prompts)]


def parts(sample: Any) -> tuple[list[int], list[int]]:
    ids, labels = list(sample["input_ids"]), list(sample["labels"])
    begin = labels.count(-100)
    assert labels == [-100] * begin + ids[begin:]
    return ids[:begin], ids[begin:]


@settings(max_examples=200, deadline=None)
@given(prompts=st.lists(st.integers(1, 6), min_size=2, max_size=24))
def test_each_answer_is_used_once_and_with_another_prompt(prompts: list[int]) -> None:
    samples = of_prompts(prompts)
    most = max(map(prompts.count, prompts))
    if 2 * most > len(prompts):
        with pytest.raises(
            DataError, match=f"^data: {most} of {len(prompts)} answers are to the same prompt, and kto pairs"
        ):
            Mismatched(InMemory(samples), 9)
        return
    found = Mismatched(InMemory(samples), 9)
    assert sorted(found.partners.tolist()) == list(range(len(samples)))
    for number, sample in enumerate(found.samples):
        prompt, answer = parts(sample)
        assert prompt == parts(samples[number])[0]
        assert answer == parts(samples[found.partners[number]])[1]
        assert prompts[number] != prompts[found.partners[number]]
        assert len(sample["input_ids"]) == found.lengths[number]
        assert trained_count(sample["labels"]) == found.supervised[number]


def test_the_order_of_the_samples_does_not_decide_where_prompts_differ() -> None:
    samples = of_prompts(list(range(1, 30)))
    shuffled = random.Random(3).sample(range(len(samples)), len(samples))
    first = Mismatched(InMemory(samples), 9)
    other = Mismatched(InMemory([samples[number] for number in shuffled]), 9)
    for place, number in enumerate(shuffled):
        assert shuffled[other.partners[place]] == first.partners[number]


def test_the_limit_leaves_one_token_of_the_answer_at_least() -> None:
    samples = [single([1] * 5, [2]), single([3], [4] * 6)]  # 6 and 7 tokens
    found = Mismatched(InMemory(samples), 7)
    assert [list(each["input_ids"]) for each in found.samples] == [[1, 1, 1, 1, 1, 4, 4], [3, 2]]
    assert found.lengths.tolist() == [7, 2] and list(found[0]["labels"]) == [-100] * 5 + [4, 4]
    assert Mismatched(InMemory(samples), 6).lengths.tolist() == [6, 2]
    assert not found.first.any() and len(found) == 2


def test_a_first_token_belongs_to_the_prompt() -> None:
    """It has no predecessor that could predict it, so a document would have no trained token without another one."""
    samples: list[Sample] = [{"input_ids": [n, n + 10], "labels": [n, n + 10]} for n in range(1, 3)]
    found = Mismatched(InMemory(samples), 9)
    assert [list(each["input_ids"]) for each in found.samples] == [[1, 12], [2, 11]]
    assert [list(each["labels"]) for each in found.samples] == [[-100, 12], [-100, 11]]
    assert numpy.array_equal(found.supervised, [1, 1])


def with_image(sample: Sample, path: str, begin: int) -> Sample:
    return sample | {"images": [Image(path, path, 8, 8, 1, begin)]}


def test_prompts_keep_their_images_and_the_same_words_about_others_are_other_prompts() -> None:
    samples = [with_image(single([7, 9], [n, n + 1]), f"{n}.png", 1) for n in range(20, 24)]
    found = Mismatched(InMemory(samples), 9)
    assert [each["images"] for each in found.samples] == [each["images"] for each in samples]
    assert all(partner != number for number, partner in enumerate(found.partners))
    assert found.image_tokens.tolist() == [1] * 4


def test_an_image_in_an_answer_is_refused() -> None:
    samples = [single([n], [n + 20, n + 21]) for n in range(3)]
    with pytest.raises(DataError, match=r"^data: an answer has an image, and kto puts each answer behind another"):
        Mismatched(InMemory([*samples, with_image(single([4], [24, 25]), "a.png", 2)]), 9)
