"""Predict a step of weight streaming (`options.weight_streaming.schedule`) for a model and its GPUs.

The blocks, and the embedding with the first ones, are cut into forward slots and, independently, into backward slots,
so that the slowest is as fast as possible; the head has slots of its own, forward and backward at once. They share it
by micro-batches, as many as it takes to be little slower than a block's backward slot, and as a small host has room
for: that depends on the model and the host, and not on the number of GPUs, which so changes no bit. Every block
recomputes: a forward slot leaves the input of each of its blocks in host memory, and a backward slot fetches it; a
block's last product is left out there (`products`). Where the host has the memory, up to `MOST_KEPT` others may stay in
it from one slot to the other: their bytes cross the links beside the computing. Tried are one to `MOST_BLOCKS` blocks
in a backward slot, forward slots about as long, and all sizes of a round. In fp8 a slot rounds its weights before its
micro-batches (`eight_bits`).

With rows in chunks a turn's activations are those of the longest chunk; of whole rows it has hidden states and one
layer's keys and values. A backward slot makes these first: the forward pass of one chunk more. Gradients of weights are
added to their sums once a chunk.

Not counted: loading data, other programs on the host, what the updates and the transfers of the next step's first
weights cost each other, and what comes before attention in the other chunks, whose keys and values are made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import ceil
from operator import attrgetter

from common.quantities import gigabytes
from options.planner.costs import CASTS_EAGER, FP32_SUM, layer_times, share_of_product
from options.planner.inputs import Basis, layer_kinds
from options.planner.memory import FP8_EAGER, MemoryModel, beside_weights
from options.planner.partition import best_split
from options.planner.plan import RESOLUTION
from options.planner.progress import each_of
from options.planner.row_chunks import chunk_of
from options.planner.row_chunks import cut as cut_rows
from options.planner.saved import carried_numbers
from options.weight_streaming.products import last_product, worth_keeping
from options.weight_streaming.schedule import WEIGHT_STREAMING, Slot, Slots, StreamedDivision, simulate_turns
from options.weight_streaming.streamed_plan import TOTAL_HOST, StreamedPlan, describe_turns, least
from training.config.optimization import OptimizerOffload
from training.config.precision import training_dtype
from training.metrics.devices import HOST_LINK
from training.topology import layer_ranges

MOST_BLOCKS = 4
MOST_HEADS = 8  # slots of the head: each has sums of its own in host memory
LONGER = 1.5  # times a block's backward slot that a slot of the head may take: the next half of it gains 1 %
OF_HEADS = 1 / 4  # of the host's memory beside weights, sums and states, that sums of further slots may take
MOST_ROUND = 64  # micro-batches, whose blocks' inputs lie in host memory
MOST_KEPT = 2  # products of each block, which a llama's MLP begins with: others take more memory for what they spare
KEPT_GAINS = 1.02  # times as fast is a step at least for whose kept products the host gives more memory
NEAR = 1.05  # times the fastest plan's time up to which one is worth trying with kept products
OF_MAIN_MEMORY = 0.9  # that a plan with them may take, as they are not needed
UPDATED = 12  # bytes of main memory that an update reads and writes for a parameter, beside states: gradient and weight
ADDING = 3  # times that adding up the heads' sums moves them
SUM = 4  # bytes of a gradient's sum in main memory; of one of a key or a value on a device
OF_COPIES, OF_KEPT = "weights of a turn in 8 bits", "kept products"
OF_ROWS, OF_OPTIMIZER = "hidden states of whole rows", "optimizer states, and what makes the weights fp32"


class Streaming:
    """The slots of a model on GPUs that share one host."""

    def __init__(self, basis: Basis, gpus: int) -> None:
        zero = basis.config.zero_optimization.model_copy(
            update={"stage": 1, "offload_optimizer": OptimizerOffload(device="cpu")}
        )
        keys = {"schedule": WEIGHT_STREAMING, "use_grad_ckpt": True, "zero_optimization": zero}
        topo = basis.config.model_topo.spread(1, 1)
        in_chunks = basis.changed(model_topo=topo, offload_activations=False, offload_gradients=True, **keys)
        chunk = chunk_of(basis.config)
        self.basis = in_chunks.in_chunks_of(None) if chunk else in_chunks  # of whole rows, but for `_cut_rows`
        plain = self.basis.changed(offload_gradients=False)  # here sums cross in each round, not in each micro-batch

        self.gpus, self.head = gpus, basis.spec.n_layers - 1
        self.forward, self.backward = passes(plain)
        self._begins, self._copies, self._rounding = [0.0] * basis.spec.n_layers, [0] * basis.spec.n_layers, 0
        if plain.in_fp8:
            self._copy_weights(plain)
        itemsize = training_dtype(plain.config).itemsize
        self._memory, self._hidden_of_rows, self._keys_of_rows = MemoryModel(self.basis), 0, 0
        if chunk:
            self._cut_rows(in_chunks, chunk, itemsize)

        self._weights = [numel * itemsize for numel in self.basis.parameters]
        self._sums = [numel * SUM for numel in self.basis.trained]
        trained, (beside, averages) = sum(self.basis.trained), beside_weights(plain.config)
        self.heads = self._head_slots(plain, sum(self._weights) + trained * (beside + averages + SUM))
        self._update = [numel * (UPDATED + 2 * averages) / TOTAL_HOST for numel in self.basis.trained]

        # A turn of the head beyond the first has sums of its own, which the update adds up.
        more = (self.heads - 1) * self._sums[self.head]
        self._host = {
            "weights": sum(self._weights),
            OF_OPTIMIZER: int(trained * (beside + averages)),
            "sums of gradients": int(trained * SUM + more),
        }
        self._update[self.head] += ADDING * more / TOTAL_HOST
        tokens = self.basis.share.micro_tokens
        self._hidden = tokens * basis.spec.config.hidden_size * itemsize
        # Of each layer the products that may be kept: bytes of a micro-batch, and seconds of each pass.
        self._products: list[list[tuple[float, float]]] = [[] for _ in self.forward]
        for layer, kind in enumerate(layer_kinds(basis.spec)[: self.head]):
            for each in basis.once(worth_keeping, kind)[:MOST_KEPT] if layer and not chunk else ():
                seconds = self.forward[layer] * share_of_product(plain, kind, (each.takes, each.makes))
                self._products[layer].append((tokens * each.makes * itemsize, seconds))

    def _cut_rows(self, in_chunks: Basis, chunk: int, itemsize: int) -> None:
        """Count chunks in place of whole rows.

        Most tokens has a chunk of a row of short documents, which have less work.
        """
        basis, work, chunks = self.basis, self.basis.workload, in_chunks.row_chunks
        rows = chunk, basis.config.max_seq_len, work.rows, work.longest
        cuts = [basis.once(cut_rows, *rows, min(work.longest, each)) for each in (work.longest, ceil(work.attended))]
        if chunks == 1 == min(map(len, cuts)):
            return
        self._memory = MemoryModel(replace(basis, workload=replace(work, longest=max(map(max, cuts)))))

        # Of hidden states what is there, what comes, and what leaves. Keys and values with sums of their gradients, and
        # twice what is added to these: a kernel's gradients are of a part of the row, and become the row's.
        self._hidden_of_rows = 3 * work.rows * work.longest * basis.spec.config.hidden_size * itemsize
        self._keys_of_rows = max(carried_numbers(in_chunks)) * (itemsize + SUM + 2 * itemsize)

        added = (chunks - 1) * FP32_SUM / basis.device.bandwidth
        for layer in range(1, basis.spec.n_layers):
            self.backward[layer] += added * basis.trained[layer]
            if layer < self.head:
                self.backward[layer] += self.forward[layer] / chunks

    def _copy_weights(self, basis: Basis) -> None:
        """Count copies of the weights in 8 bits, which linear layers have; a turn makes those of its own."""
        for layer in range(1, self.head):
            numels = [shape.numel() for shape in basis.shapes(layer).values() if len(shape) > 1]
            self._copies[layer], self._rounding = sum(numels), max(self._rounding, max(numels) * FP8_EAGER)
            self._begins[layer] = self._copies[layer] * sum(CASTS_EAGER) / basis.device.bandwidth

    def best(self) -> StreamedPlan | None:
        """Return, of the fastest plans that fit, the one that takes the least memory of the host."""
        fitting = [plan for plan in self.plans if plan.fits]
        found, within = least(fitting), NEAR * min((plan.seconds for plan in fitting), default=0.0)
        near = [plan for plan in fitting if plan.seconds <= within]
        for count in range(1, 1 + MOST_KEPT):
            keeping = least(list(self.keeping(near, count)))
            if found and keeping and keeping.seconds * KEPT_GAINS <= found.seconds:
                found = keeping
        return found

    def keeping(self, plans: Iterable[StreamedPlan], count: int) -> Iterator[StreamedPlan]:
        """Yield these plans with so many products of each block kept in host memory, if there are any and they fit."""
        size, memory = max(self._of_products(count)[0]), self.basis.main_memory
        for plan in plans if size and memory is not None else ():
            slots = replace(plan.slots, kept=count)
            host = {**plan.of_host, OF_KEPT: int(slots.a_round * (self.head - 1) * size)}
            # Of one block they are there, and those of another come or leave.
            device = {**plan.of_device, f"{OF_KEPT} of two blocks": int(2 * size)}
            kept = replace(plan, slots=slots, of_host=host, of_device=device)
            if kept.fits and kept.host <= OF_MAIN_MEMORY * (memory or 0):
                turns = self.slots(slots.forward, slots.backward, count)
                step = simulate_turns(turns, self.gpus, self.basis.micro_batches, slots.a_round, HOST_LINK)
                yield replace(kept, turns=turns, step=step)

    def _of_products(self, count: int) -> tuple[list[float], list[float]]:
        """Return, by layer, the bytes of so many products of a micro-batch and the seconds to compute them."""
        sizes, seconds = [], []
        for layer in self._products:
            sizes.append(sum(size for size, _ in layer[:count]))
            seconds.append(sum(time for _, time in layer[:count]))
        return sizes, seconds

    def smallest(self) -> StreamedPlan | None:
        """Return the plan that takes the least memory: of the host where it fits a device, else of that."""
        fitting = [plan for plan in self.plans if plan.fits_device]
        if fitting:
            return min(fitting, key=attrgetter("host"))
        return min(self.plans, key=attrgetter("peak"), default=None)

    @cached_property
    def plans(self) -> list[StreamedPlan]:
        return list(self._tried())

    def _tried(self) -> Iterator[StreamedPlan]:
        number = self.basis.micro_batches
        sizes = [size for size in range(min(self.gpus, number), min(MOST_ROUND, number) + 1) if number % size == 0]

        # The embedding beside blocks, or alone, where both together take too much memory.
        options = product((self.head - 1, self.head), range(1, MOST_BLOCKS + 1))
        counts = {-(-layers // blocks) for layers, blocks in options}

        for slots in each_of(sorted(counts), "divisions into turns"):
            backward = cut(self.backward[: self.head], slots)
            longest = max(sum(self.backward[begin:end]) for begin, end in layer_ranges(backward))
            fewest = max(1, round(sum(self.forward[: self.head]) / longest))
            for count in range(fewest, min(fewest + 3, self.head) + 1):
                forward = cut(self.forward[: self.head], count)
                made, memory = self.slots(forward, backward), self.memory(forward, backward)
                for a_round in sizes if len(made) > self.gpus else ():
                    step = simulate_turns(made, self.gpus, number, a_round, HOST_LINK)
                    host = self._host | {"inputs of a round's blocks": int(a_round * self.head * self._hidden)}
                    found = Slots(tuple(forward), tuple(backward), a_round, self.heads)
                    yield StreamedPlan(self.basis, self.gpus, found, made, step, memory, host)

    def _head_slots(self, basis: Basis, held: float) -> int:
        """Return a power of two, which divides most rounds.

        Args:
            held: bytes of the host that are needed anyway; most of the others are for the inputs of blocks.
        """
        most: float = min(MOST_HEADS, basis.micro_batches)
        if basis.main_memory is not None:
            most = min(most, 1 + OF_HEADS * (basis.main_memory - held) / max(1, self._sums[self.head]))
        # By estimates: a resumed run has measured its first steps, and has to have the same sums.
        forward, backward = passes(replace(basis, calibration=None, measured=None))
        longest, slots = LONGER * max(backward[:-1]), 1
        while forward[-1] + backward[-1] > slots * longest and 2 * slots <= most:
            slots *= 2
        return slots

    def slots(self, forward: Sequence[int], backward: Sequence[int], kept: int = 0) -> list[Slot]:
        """Return a round's slots, with so many products of each block kept."""
        sizes, spared = self._of_products(kept)
        made = [
            Slot(
                sum(self.forward[begin:end]),
                sum(self._weights[begin:end]),
                enters=self._hidden if begin else 0.0,
                leaves=(end - begin) * self._hidden + sum(sizes[begin:end]),
                update=sum(self._update[begin:end]),
                begins=sum(self._begins[begin:end]),
            )
            for begin, end in layer_ranges(forward)
        ]

        head, hidden = self.head, self._hidden
        both = self.forward[head] + self.backward[head]
        for part in range(self.heads):
            update = 0.0 if part else self._update[head]
            share = part, self.heads
            made.append(Slot(both, self._weights[head], self._sums[head], hidden, hidden, update, share))

        for begin, end in reversed(layer_ranges(backward)):
            inputs = end - max(begin, 1)  # the embedding's is not kept
            leaves = hidden if begin else 0.0
            seconds = sum(self.backward[begin:end]) - sum(spared[begin:end])
            weights, enters = sum(self._weights[max(begin, 1) : end]), (inputs + 1) * hidden + sum(sizes[begin:end])
            sums, begins = sum(self._sums[begin:end]), sum(self._begins[begin:end])
            made.append(Slot(seconds, weights, sums, enters, leaves, begins=begins))
        return made

    def memory(self, forward: Sequence[int], backward: Sequence[int]) -> dict[str, int]:
        """Return most bytes of a GPU: two buffers of weights and of sums, and what computing a slot takes."""
        ranges = [*layer_ranges(forward), *layer_ranges(backward), (self.head, self.head + 1)]
        weights = max(sum(self._weights[begin:end]) for begin, end in ranges)
        sums = max(sum(self._sums[begin:end]) for begin, end in ranges[len(forward) :])
        activations = []
        for held in ranges:
            kept = 0 if held[0] == self.head else self._keys_of_rows
            activations.append(self._memory.rank(0, (held,)).activations + kept)
        return {
            "weights of two turns": int(2 * weights),
            "sums of gradients of two turns": int(2 * sums),
            "activations of a turn": max(*activations, self._rounding),
            **({OF_COPIES: max(sum(self._copies[begin:end]) for begin, end in ranges)} if any(self._copies) else {}),
            **({OF_ROWS: self._hidden_of_rows} if self._hidden_of_rows else {}),
        }


def passes(basis: Basis) -> tuple[list[float], list[float]]:
    """Return seconds of a forward pass through each layer, and of a backward pass with all but a last product again."""
    spared = {0: 0.0, basis.spec.n_layers - 1: 0.0}  # which part of a forward pass is left out, by kind of layer
    for kind in set(layer_kinds(basis.spec)) - spared.keys():
        spared[kind] = share_of_product(basis, kind) if basis.once(last_product, kind) else 0.0

    forward, backward = [], []
    for time, kind in zip(layer_times(basis), layer_kinds(basis.spec), strict=True):
        forward.append(time.forward.total)
        backward.append(time.backward.total - spared[kind] * time.forward.total)
    return forward, backward


def divide(basis: Basis) -> StreamedDivision:
    """Divide a run's model: into the turns of the fastest plan that fits, else of a layer each."""
    config, streaming = basis.config, Streaming(basis, basis.config.model_topo.stages)
    each = (1,) * (basis.spec.n_layers - 1)
    slots = Slots(each, each, min(MOST_ROUND, basis.micro_batches), streaming.heads)
    report = []
    if found := streaming.best() or streaming.smallest():
        slots = found.slots
        if not found.fits:
            least = f"{gigabytes(found.peak)} of a device and {gigabytes(found.host)} of the host"
            report.append(f"warning: weight streaming: planned to take {least}, which have less")

    # Who loads and saves which layers: each about as many weights.
    parts = config.parts_for(basis.spec.n_layers) or cut(basis.trained, config.chunks)
    return StreamedDivision(config.topology(parts), report=(*report, *describe_turns(slots)), slots=slots)


def cut(costs: Sequence[float], slots: int) -> list[int]:
    """Cut layers into as many slots, the largest sum of their costs as small as possible."""
    parts = best_split(slots * [[round(cost / RESOLUTION) for cost in costs]], lambda *_: True)
    assert parts is not None
    return parts
