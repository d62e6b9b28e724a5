"""What fp8 (`models.block_options`) adds to the work of a block: before each product, passes that round both factors.

Compiled, torchao's own roofline has it (torchao.testing.training.roofline_utils, tensorwise): one pass finds a tensor's
largest value (2 bytes read), and one reads it again and writes it for both products that it is a factor of (2 + 2
bytes). Eager, each operation on the way is a pass of its own, three of them in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from models.costs import LayerWork, Operation

# Bytes that are read and written for each element of a factor, by pass.
COMPILED = (1, 2)
EAGER = (4, 2, 6, 8, 8, 5)  # absolute values, the largest; to fp32, scaled, clamped, to 8 bits
# Bytes for an element of the largest factor while it is rounded: two copies in fp32 and the 8 bits, or these alone for
# both factors in both orders.
HELD_EAGER, HELD_COMPILED = 9, 4


def in_fp8(work: LayerWork, compiled: bool) -> LayerWork:
    """The same block with the products of its linear layers in fp8."""
    return LayerWork(tuple(_with_casts(work.forward, compiled)), tuple(_with_casts(work.backward, compiled)))


def _with_casts(operations: Iterable[Operation], compiled: bool) -> Iterator[Operation]:
    for operation in operations:
        at_a_time, rows, columns = operation.shape
        if operation.kind != "products" or at_a_time > 1:  # several at a time are those of attention
            yield operation
            continue
        inner = round(operation.flops / 2 / rows / columns)
        for elements in (rows * inner, inner * columns):
            for size in COMPILED if compiled else EAGER:
                yield Operation("traffic", {0: elements * size}, {})
        yield replace(operation, reads={0: rows * inner + inner * columns}, fp8=True)
