"""The golden folders of models of images and text, and what transformers computed of them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from models import CausalLM
from models.api import read_spec
from models.attention.packed import Documents
from models.checkpoint.source import HuggingFaceSource
from models.derived.proof import CPU, gradients_of
from models.images import Eyes, seeing
from models.loss.interface import IGNORED
from tests.golden_vision import expected, tensors

LAST = 8  # tokens whose logits are kept


class Golden:
    """One of the folders, loaded with eyes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = seeing(read_spec(folder))
        self.source = HuggingFaceSource(folder, self.spec)
        name = folder.name.removesuffix("-tiny")
        self.expected, self.tensors = expected(name), tensors(name)
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    @property
    def sees(self) -> Eyes:
        assert isinstance(self.spec.family.sees, Eyes)
        return self.spec.family.sees

    @cached_property
    def model(self) -> CausalLM:
        return self.load()

    def load(self) -> CausalLM:
        return CausalLM(self.spec, self.source, torch.float32, CPU).eval()

    def ids(self, sample: int) -> Tensor:
        return self.tensors[f"s{sample}.input_ids"]

    def images(self, *samples: int) -> list[Tensor]:
        """The tensors of all images of some samples; none where they have none."""
        paths = [path for sample in samples for path in self.expected["samples"][sample]["images"]]
        return self.tensors_of(*paths)

    def tensors_of(self, *paths: str) -> list[Tensor]:
        if not paths:
            return []
        pictures = [Image.open(self.folder / path).convert("RGB") for path in paths]
        found: Any = self._processor(images=pictures, return_tensors="pt")
        return [torch.as_tensor(found[name]) for name in self.sees.inputs]

    def logits(self, sample: int, images: list[Tensor] | None = None) -> Tensor:
        """Logits [L, V] of a sample."""
        given = self.images(sample) if images is None else images
        found: Tensor = self.model(self.ids(sample)[None], images=given)[0]
        return found

    def loss(self) -> Tensor:
        """The mean cross-entropy of all trained tokens of the four samples."""
        total = torch.zeros(())
        for sample in range(len(self.expected["samples"])):
            labels = self.tensors[f"s{sample}.labels"]
            total = total + F.cross_entropy(self.logits(sample)[:-1], labels[1:], ignore_index=IGNORED, reduction="sum")
        return total / self.expected["n_trained"]

    def packed(self, *samples: int) -> tuple[Tensor, Tensor]:
        """Ids and position ids of samples in one row, [1, S]."""
        ids = [self.ids(sample) for sample in samples]
        return torch.cat(ids)[None], torch.cat([torch.arange(len(each)) for each in ids])[None]

    def documents(self, *samples: int) -> Documents:
        ids, positions = self.packed(*samples)
        return self.sees.documents(ids, Documents.of(positions), self.images(*samples))

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of `loss` by name on disk."""
        self.model.zero_grad()
        self.loss().backward()
        return {name: each.detach() for name, each in gradients_of(self.model, self.source.weight_map)}

    def bound(self, what: str) -> float:
        """The largest difference that is rounding, as the README of the folders states it."""
        steep = self.folder.name == "qwen3_5-tiny" and what == "gradients"
        return 2e-4 if steep else {"logits": 2e-5, "loss": 1e-5, "gradients": 1e-4}[what]
