"""What a micro-batch of pairs with images carries."""

from __future__ import annotations

import torch

from data.images.ahead import PictureSettings
from data.images.collation import SeeingCollation
from data.loader import Loader
from data.sample_set import InMemory, Sample
from options.preference.collation import JudgedCollation
from tests import golden_vision as golden
from tests.data.images.test_collation import sample
from tests.golden_vision import needs_golden

pytestmark = needs_golden


def test_the_images_of_a_pairs_documents_come_in_their_order() -> None:
    """An exchange of the two would be seen."""
    one, other = sample("llava", 0), sample("llava", 1)
    first = len(one["input_ids"])
    moved = [image._replace(begin=image.begin + first) for image in other["images"]]
    ids, labels = (one[key] + other[key] for key in ("input_ids", "labels"))
    pair: Sample = {"input_ids": ids, "labels": labels, "first": first, "images": one["images"] + moved}
    data = InMemory([pair])
    seeing = SeeingCollation(JudgedCollation(data), PictureSettings(golden.folder("llava")), ("pixel_values",))
    cut = Loader(data, 1, 1, 1, seed=0, collation=seeing)
    (((_, positions, pixels), (*_, numbered, _, _)),) = cut.tensors(cut.batch(0), 0)
    expected = [golden.pictures("llava").tensors(each["images"])["pixel_values"] for each in (one, other)]
    assert torch.equal(pixels, torch.cat(expected)) and not torch.equal(pixels, torch.cat(expected[::-1]))
    assert positions[0, first] == 0 and numbered[0, first - 1 : first + 1].tolist() == [0, 1]
