"""Compare a model that sees with transformers' whole one, on a small model with the traits of the large one.

transformers writes a whole model with random weights, and the family's table, with the rules of the tower, reads it.
Compared are the round trip of every weight, logits, loss and every gradient of rows with images of unequal sizes, the
tower trained; two stages with one, both documents in a row with each alone, and text alone. A model that fails in one
of them is refused, with the figure and the bound.

Cost: some seconds on a CPU, in fp32.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from models.architectures import declared_family
from models.attention.packed import Documents
from models.attention.positions import LINEAR, attention_kind
from models.causal_lm import CausalLM
from models.checkpoint.source import HuggingFaceSource
from models.config_json import model_fields
from models.derived.derive import derive
from models.derived.outline import Underivable
from models.derived.proof import (
    CPU,
    GRADIENTS,
    Compared,
    Figures,
    apart,
    apart_from_callers,
    bound,
    check_names,
    gradients_of,
    roughen,
    write_checkpoint,
)
from models.errors import CheckpointError
from models.images.eyes import features_of
from models.images.model import with_eyes
from models.images.small import small_whole, token_types
from models.images.tensors import form_of, pictures
from models.images.traits import Traits, traits_of
from models.spec import ModelSpec

WORDS = (7, 5)  # of text in front of each image
LENGTH = 24  # tokens of text in a row, at least
TEXTS = "texts without images"
FIRST = 3  # words are numbered from here on


class ImageProof(Compared):
    """The result of the comparison of a whole model."""

    traits: Traits

    def __str__(self) -> str:
        return f"images {super().__str__()}"


class Rows:
    """Two rows, each a text with one of two images in the middle, of equal length."""

    def __init__(self, whole: Any, traits: Traits) -> None:
        self.inputs, self.token = traits.inputs, int(whole.config.image_token_id)
        self.form, self.images = form_of(whole.config, traits.inputs), pictures(whole.config, traits.inputs)
        base = getattr(whole, whole.base_model_prefix)
        counts = [len(features_of(base, self.inputs, self.form.one(self.images, row))) for row in range(len(WORDS))]
        length = LENGTH + max(counts)
        self.ids = torch.randint(FIRST, int(whole.config.get_text_config().vocab_size) - 16, (len(WORDS), length))
        for row, (begin, count) in enumerate(zip(WORDS, counts, strict=True)):
            self.ids[row, begin : begin + count] = self.token

    def of(self, number: int) -> dict[str, Tensor]:
        """Get the tensors of one row's image by name."""
        return dict(zip(self.inputs, self.form.one(self.images, number), strict=True))

    def alone(self, whole: Any, row: int) -> Tensor:
        """Compute transformers' logits of one row, [S, V]."""
        ids = self.ids[row : row + 1]
        logits: Tensor = whole(input_ids=ids, **self.of(row), **token_types(whole, ids), use_cache=False).logits[0]
        return logits


def prove(spec: ModelSpec) -> ImageProof:
    """Compare a model of images and text with transformers.

    Args:
        spec: as read from a checkpoint, without eyes.

    Raises:
        Underivable: it does not hold; the text says in what it differs, or what is missing.
    """
    begin = time.perf_counter()
    with apart_from_callers(spec.config), tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        whole, folder = small_whole(spec.raw, spec.config, spec.fields), Path(name)
        roughen(whole)
        traits = traits_of(whole)
        write_checkpoint(whole, folder)
        try:
            small = small_spec(spec, whole, folder, traits)
            figures = compare(small, whole, folder, Rows(whole, traits))
        except CheckpointError as error:
            raise Underivable(str(error).removeprefix(f"{folder}: ")) from None
        linear = LINEAR in [attention_kind(small.config, block) for block in range(small.n_blocks)]
    # Where texts differ already, transformers' whole model computes them otherwise than its decoder alone.
    for way in (TEXTS, *figures):
        if not (figure := figures[way]) <= (most := bound(way, linear)):
            raise Underivable(f"{way} differ by {figure:.0e} of their size; expected at most {most:.0e}")
    return ImageProof(traits=traits, figures=figures, linear=linear, seconds=time.perf_counter() - begin)


def small_spec(spec: ModelSpec, whole: Any, folder: Path, traits: Traits) -> ModelSpec:
    """Make the spec of the small model in `folder`, with eyes."""
    raw, fields = model_fields(folder / "config.json")
    config = type(spec.config).from_dict(dict(fields))
    config._experts_implementation = "eager"
    family = declared_family(fields) or derive(config, fields, raw["model_type"])
    found = ModelSpec(family, config, raw, fields, is_part=True)
    found = with_eyes(found, whole.config, traits)
    found.set_attention(spec.family.attention[0])
    return found


def compare(spec: ModelSpec, whole: Any, folder: Path, rows: Rows) -> Figures:
    """Compare our model with transformers', whose checkpoint lies in `folder`."""
    source = HuggingFaceSource(folder, spec)
    check_names(source)
    ours = CausalLM(spec, source, torch.float32, CPU)
    ids = rows.ids
    wanted = torch.stack([rows.alone(whole, row) for row in range(len(ids))])
    found = ours(ids, images=rows.images)

    whole.zero_grad()
    targets = ids[:, 1:].flatten()
    losses = [F.cross_entropy(each[:, :-1].flatten(0, 1), targets) for each in (wanted, found)]
    for loss in losses:
        loss.backward()
    figures = {"logits": apart(found, wanted), "losses": apart(losses[1], losses[0])}
    gradients = revert_weight_conversion(whole, {n: p.grad for n, p in whole.named_parameters() if p.grad is not None})
    own = dict(gradients_of(ours, source.weight_map))
    figures[GRADIENTS] = torch.inf  # where one reaches a weight in one of the two alone
    if own.keys() == gradients.keys():
        figures[GRADIENTS] = max(apart(gradient, gradients[name]) for name, gradient in own.items())

    with torch.inference_mode():
        figures["stages"] = apart(in_stages(spec, source, rows), found)
        figures["documents in a packed row"] = apart(packed(ours, rows), found.flatten(0, 1))
        words = ids.masked_fill(ids == rows.token, FIRST)
        figures[TEXTS] = apart(ours(words), whole(input_ids=words, use_cache=False).logits)
    return figures


def in_stages(spec: ModelSpec, source: HuggingFaceSource, rows: Rows) -> Tensor:
    """Compute logits in two stages, the first of which has all blocks that features are added behind."""
    sees = spec.family.sees
    assert sees is not None
    middle = max(spec.n_layers // 2, 1 + sees.deep)
    parts = [range(middle), range(middle, spec.n_layers)]
    first, second = (CausalLM(spec, source, torch.float32, CPU, part) for part in parts)
    positions = torch.arange(rows.ids.shape[1]).repeat(len(rows.ids), 1)
    documents = sees.documents(rows.ids, Documents.of(positions), rows.images)
    for stage in (first, second):
        stage.positions.expect([documents])
    hidden, positions, *_ = first.activations(rows.ids, positions, images=rows.images)
    return second(hidden, positions)


def packed(ours: CausalLM, rows: Rows) -> Tensor:
    """Compute logits of both texts as documents of one row, [2 S, V]."""
    positions = torch.arange(rows.ids.shape[1]).repeat(len(rows.ids))[None]
    logits: Tensor = ours(rows.ids.reshape(1, -1), positions, images=rows.images)
    return logits[0]
