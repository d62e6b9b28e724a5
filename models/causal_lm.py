"""The whole model in one process: the same layers as in the pipeline, one after the other.

It is the reference that every pipeline is compared with. For generation in several processes each holds some of the
layers, or its shards of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.attention.cache import KeyValueCache
from models.attention.packed import Documents, unmarked
from models.layers import Activations, Block, Embedding, Head
from models.loading import LayerStates, build_layer, tie_weights
from models.parallel.groups import ONE_RANK, RankGroups
from models.parallel.tensor import TensorShare
from models.spec import ModelSpec


class CausalLM(nn.Module):
    """Embedding, blocks and head as one module; parameters are `layers.<layer>.<name>`."""

    def __init__(
        self,
        spec: ModelSpec,
        states: LayerStates,
        dtype: torch.dtype,
        device: torch.device,
        part: Sequence[int] | None = None,
        share: TensorShare | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        share, part = share or TensorShare(spec, ONE_RANK), part or range(spec.n_layers)
        self.positions = spec.positions(RankGroups(tensor=share.ranks))
        built = (build_layer(spec, layer, states, self.positions, dtype, device, share) for layer in part)
        self.layers = nn.ModuleList(built)
        if spec.tied and len(part) == spec.n_layers:
            tie_weights(self.embedding, self.head)

    @property
    def embedding(self) -> Embedding:
        layer = self.layers[0]
        assert isinstance(layer, Embedding)
        return layer

    @property
    def blocks(self) -> list[Block]:
        return [layer for layer in self.layers if isinstance(layer, Block)]

    @property
    def head(self) -> Head:
        layer = self.layers[-1]
        assert isinstance(layer, Head)
        return layer

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
        images: Sequence[Tensor] = (),
    ) -> Tensor:
        """Compute logits [B, S, V] for `input_ids` [B, S].

        Args:
            position_ids: [B, S], restarting at 0 with each document; 0 .. S-1 behind what the cache holds if absent.
            cache: keys and values of the tokens before, extended in place; for generation.
            images: the tensors of `Sees.inputs` of all images, in the order of rows and places.
        """
        logits: Tensor = self.head(self.activations(input_ids, position_ids, cache, images))
        return logits

    def activations(
        self,
        inputs: Tensor,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
        images: Sequence[Tensor] = (),
    ) -> Activations:
        """Run the layers up to the last block: hidden states, position ids, router sums.

        Args:
            inputs: token ids [B, S]; without an embedding here hidden states [B, S, H].
        """
        if position_ids is None:
            length, device = inputs.shape[1], inputs.device
            first = torch.arange(length, device=device).expand(inputs.shape[:2])
            position_ids = first if cache is None else cache.positions(length, device)
        if images:
            self._expect(inputs, position_ids, cache, images)
        activations: Activations = (inputs, position_ids, *images)
        for layer in self.layers:
            if isinstance(layer, Embedding):
                activations = layer(activations)
            elif isinstance(layer, Block):
                activations = layer(activations, cache)
        if cache is not None:
            cache.advance(inputs.shape[1])
        return activations

    def _expect(
        self, input_ids: Tensor, position_ids: Tensor, cache: KeyValueCache | None, images: Sequence[Tensor]
    ) -> None:
        """Set what images change of the documents, where the caller has not done so.

        Raises:
            ValueError: the model has no eyes, or a cache has tokens already.
        """
        sees, begun = self.spec.family.sees, cache is not None and cache.longest > 0
        if sees is None or begun:
            what = "a model opened without eyes" if sees is None else "rows that are begun"
            raise ValueError(f"images with {what}; expected models.images.seeing and whole rows")
        if cache is None and self.positions.awaits:
            return
        documents = sees.documents(input_ids, Documents.of(unmarked(position_ids)), images)
        self.positions.expect([documents])
        if cache is not None and documents.axes is not None:
            ends = documents.axes.amax(dim=(0, 2)) + 1
            cache.shifts = [end - input_ids.shape[1] for end in ends.tolist()]
