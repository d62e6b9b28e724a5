"""Give each prompt the answer to another prompt: what KTO estimates its KL divergence from (`UnpairedLoss`).

Samples are ordered by a digest of their prompts, and each gets the answer of the one m places further, the last ones
those of the first; m is the most answers that a prompt has. So no prompt meets an answer to itself, each answer is used
once, and all of it depends on the samples alone: the reference's log-probabilities are computed once for all epochs,
and neither batches nor topology change anything.

Cost: every sample is read once, 60,000 a second (of 400 tokens, in memory); 28 bytes a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy

from data.errors import DataError
from data.images.beside_samples import digested
from data.sample_set import IGNORED, Sample, SampleSet


class Mismatched(Sequence[Sample]):
    """Hold samples of one document: those of a set, each with another one's answer. It is its own `samples`.

    Args:
        data: samples of one document, each with a trained token.
        limit: most tokens; what is longer is cut at the end, which leaves at least one of the answer's.
        what: the samples are, for an error.

    Attributes:
        partners: [n], the sample whose answer each has.

    Raises:
        DataError: more than half of all answers are to the same prompt, or one has an image.
    """

    def __init__(self, data: SampleSet, limit: int, what: str = "data") -> None:
        self._data, self._limit = data, limit
        digests = numpy.empty(len(data.lengths), numpy.uint64)
        self._begins = numpy.empty(len(digests), numpy.int32)  # of the answers
        for number, sample in enumerate(data.samples):
            # The first token cannot be predicted, so it belongs to the prompt.
            begin = 1 + int((numpy.asarray(sample["labels"][1:]) != IGNORED).argmax())
            prompt = numpy.asarray(sample["input_ids"][:begin], numpy.int32).tobytes()
            if images := sample.get("images"):
                if images[-1].begin >= begin:
                    raise DataError(
                        f"{what}: an answer has an image, and kto puts each answer behind another prompt; expected "
                        "images in prompts alone, or preference.loss: apo_zero_unpaired"
                    )
                prompt += digested(images)
            self._begins[number] = begin
            digests[number] = int.from_bytes(blake2b(prompt, digest_size=8).digest(), "little")
        most = int(numpy.unique(digests, return_counts=True)[1].max())
        if 2 * most > len(digests):
            raise DataError(
                f"{what}: {most:,} of {len(digests):,} answers are to the same prompt, and kto pairs each prompt with "
                "an answer to another one; expected at most half of them, or preference.loss: apo_zero_unpaired"
            )
        order = numpy.argsort(digests, kind="stable")
        self.partners = numpy.empty_like(order)
        self.partners[order] = numpy.roll(order, -most)
        answers = data.lengths[self.partners] - self._begins[self.partners]
        self.lengths = numpy.minimum(self._begins + answers, limit).astype(numpy.int32)
        self.supervised = data.supervised[self.partners]  # before the cut
        self.first = self.first_supervised = numpy.zeros(len(digests), numpy.int32)
        self.image_tokens = data.image_tokens
        self.values = numpy.zeros(len(digests), numpy.float32)

    @property
    def samples(self) -> Sequence[Sample]:
        return self

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: Any) -> Any:
        asked, answered = self._data.samples[number], self._data.samples[int(self.partners[number])]
        begin, other = int(self._begins[number]), int(self._begins[self.partners[number]])
        ids = numpy.concatenate([asked["input_ids"][:begin], answered["input_ids"][other:]])
        labels = numpy.concatenate([numpy.full(begin, IGNORED), answered["labels"][other:]])
        made = {"input_ids": ids[: self._limit], "labels": labels[: self._limit]}  # arrays where a Sample has lists
        return made | {"images": asked["images"]} if "images" in asked else made
