"""How the blocks of a run are computed: recomputed, offloaded, compiled, in fp8. Only the last changes numbers."""

from __future__ import annotations

from dataclasses import dataclass

from models.blocks.fp8 import to_fp8
from models.blocks.offload import Returns
from models.layers import Block


@dataclass(frozen=True)
class BlockOptions:
    """What is done with the blocks."""

    # The numbers of the layers that keep their input, one hidden state, instead of some thirty, and are computed a
    # second time in the backward pass, which makes a third more arithmetic.
    recompute: frozenset[int] = frozenset()
    offload: bool = False  # what a block keeps waits in host memory (`models.blocks.offload`)
    # torch.compile fuses the small operations between the matrix products. All lengths share one program, and blocks of
    # one kind another's; it is made at the first steps, for some seconds up to a minute. Attention document by document
    # stays outside of it: the documents change with every micro-batch.
    compile: bool = False
    fp8: bool = False  # the factors of linear layers' products are rounded to 8 bits (`models.blocks.fp8`)

    def apply(self, number: int, block: Block, returns: Returns) -> None:
        """Prepare layer `number`; the layers of a chunk share `returns`."""
        block.recompute = number in self.recompute
        block.offload = returns if self.offload else None
        if self.fp8:
            to_fp8(block.block)
        if self.compile:
            block.block.compile(dynamic=True)


PLAIN = BlockOptions()
