"""Train with the weights in host memory, the GPUs taking turns at the layers (`schedule: weight_streaming`).

The processes of a pipeline form a pool on one host: they share one copy of the weights and of the gradient sums.
`options.weight_streaming.turns` computes a step. Then each process updates a piece of every weight on the CPU, so that
all take equally long, and holds their optimizer states (`options.weight_streaming.pieces`). It loads and saves the
layers that `parts` assigns to it. Checkpoints resume under every other schedule, and the other way round.

Each pool is a replica. A process sums the gradients of its layers with its peers in the other pools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from torch import Tensor

from data.loader import GlobalBatch, Loader, MicroBatch
from models.checkpoint.layout import layer_file
from models.parallel.groups import RankGroup
from models.spec import ModelSpec
from options.row_chunks.cuts import cuts_of
from options.weight_streaming.handover import bytes_of
from options.weight_streaming.pieces import Pieces, piece_of
from options.weight_streaming.row_passes import Batch, trained_in_chunks
from options.weight_streaming.schedule import StreamedDivision
from options.weight_streaming.shared_memory import share_tensors
from options.weight_streaming.streamed_model import StreamedModel
from options.weight_streaming.turns import Turns
from training.checkpoint.saved_slices import Slice
from training.config.deepspeed_config import loss_scaler
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.processes import agreed
from training.engine.building import build_model, copy_to_cpu, make_group
from training.engine.gradients import clip
from training.engine.trainer import Trainer
from training.optimizer.optimizers import build_optimizer
from training.topology import Division


class HostEngine:
    """Stand in for DeepSpeed's engine: step the optimizer of this process's pieces, and write checkpoints.

    Args:
        own: layers whose gradients this process sums over replicas, and which it saves.
        pool: the ranks that share the weights, in the order of their stages.
        peers: the ranks of the same stage in the other replicas.

    Attributes:
        names: trained weights of its own layers; of a tied pair the first.
        save_non_zero_checkpoint: whether this replica writes files though it is not the first.
        turns: computes the gradients.
        turn_work: what computes a micro-batch in them, by kind of turn; a timeline wraps it.
    """

    save_non_zero_checkpoint = False
    checkpoint_engine: Any
    optimizer: Any

    def __init__(
        self, model: StreamedModel, config: TrainConfig, own: list[int], turns: Turns, pool: list[int], peers: RankGroup
    ) -> None:
        self.module, self.device, self.global_steps = model, model.device, 0
        self.global_rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._own, self.turns, self._peers = own, turns, peers
        self.turn_work = turns.work
        self._stage, self._pool_size = pool.index(self.global_rank), len(pool)
        self._clipping = config.gradient_clipping or torch.finfo(torch.float32).max
        self._norm = 0.0

        tied = model.spec.tied_names or ()
        tied = tied if all(name in model.sums for name in tied) else ()
        seed = config.seed if config.bf16.bf16_optimizer_states else None
        self.pieces = Pieces(model, tied, self._stage, len(pool), seed)
        self.names = [name for name in self.pieces.masters if int(name.partition(".")[0]) in own]

        with agreed():
            self.optimizer = build_optimizer(config, self.pieces.masters.items(), model.spec.shared_names)
        self.optimizer.loss_scaler = loss_scaler(config)  # where DeepSpeed's optimizers have theirs
        self.basic_optimizer = self.optimizer
        like = {name: torch.empty(1, dtype=torch.float64, device="meta") for name in self.pieces.masters}
        self._squares = share_tensors(like, pool, model.device)

    def sum_up(self) -> None:
        """Sum the gradients over the turns of the head and over replicas; a collective call."""
        sums, meet = self.module.sums, self.turns.handover.meet
        for others in self.module.head_sums[1:]:
            for name, other in others.items():
                piece = piece_of(other.numel(), self._stage, self._pool_size)
                sums[name].view(-1)[piece] += other.view(-1)[piece]
        meet()
        if self._peers.size > 1:
            for name in [name for name in sums if int(name.partition(".")[0]) in self._own]:
                torch.distributed.all_reduce(sums[name].div_(self._peers.size), group=self._peers.group)
        meet()

    def begin_step(self) -> None:
        """Leave the memory of the gradient sums to a step; a collective call."""
        self.pieces.split()
        self.turns.handover.meet()

    def slices(self) -> list[Slice]:
        """List what this process updates, for a checkpoint, between steps."""
        return self.pieces.slices(self.optimizer)

    def update(self) -> None:
        """Clip the gradients by their global norm and update the weights; a collective call.

        As in a pipeline, a step whose norm is not finite is skipped.
        """
        meet = self.turns.handover.meet
        for name in self.names:
            self._squares[name].fill_(
                torch.linalg.vector_norm(self.pieces.gradient(name), dtype=torch.float64).square()
            )
        meet()

        # The norm of the whole gradient: each process's squares, added up in one order everywhere.
        norm = torch.stack([*self._squares.values()]).sum().sqrt().float()
        self._norm = float(norm)

        if norm.isfinite():
            masters = self.pieces.masters
            for name, master in masters.items():
                master.grad = self.pieces.gradient(name, self.pieces.ranges[name]) if master.numel() else None
            clip(self.optimizer, list(masters.values()), self._clipping, norm)
            self.pieces.update(self.optimizer, self.global_steps)

        if self.fp16_enabled():
            self.optimizer.loss_scaler.update_scale(not norm.isfinite())
        self.global_steps += 1
        meet()

    def own_weights(self) -> dict[str, Tensor]:
        """Return the trained weights of this process's layers, for a proof."""
        return {name: self.module.weights[name] for name in self.names}

    def own_gradients(self) -> dict[str, Tensor]:
        """Return their gradients, for a proof."""
        return {name: self.pieces.gradient(name).view_as(self.module.sums[name]) for name in self.names}

    def get_global_grad_norm(self) -> float:
        """Return the norm of the last step's gradient, before clipping."""
        return self._norm

    def destroy(self) -> None:
        """Release the weights, as DeepSpeed's engine does."""
        self.module.weights.clear()
        self.module.sums.clear()

    def fp16_enabled(self) -> bool:
        return self.module.dtype == torch.float16

    def zero_optimization(self) -> bool:
        return False

    def save_checkpoint(self, folder: str, tag: str, client_state: dict[str, Any], save_latest: bool) -> None:
        """Write this process's layers, and its optimizer's file as DeepSpeed writes it without ZeRO."""
        files = self.checkpoint_engine
        self.pieces.join()
        files.create(CheckpointCommitInfo(tag, folder, save_latest))
        if self._peers.rank and not self.save_non_zero_checkpoint:
            return
        for number in self._own:
            files.save(copy_to_cpu(self.module.layer(number)), str(Path(folder, tag, layer_file(number))))
        state = self.optimizer.state_dict()
        if self.module.dtype != torch.float32:
            groups = [group["params"] for group in self.optimizer.param_groups]
            scaler = self.optimizer.loss_scaler
            state = {"fp32_groups": groups, "optimizer_state_dict": state, "loss_scaler": scaler}
        path = Path(folder, tag, f"mp_rank_{self._stage:02d}_model_states.pt")
        files.save({"optimizer": state, **client_state}, str(path))


class WeightStreamingTrainer(Trainer):
    """A process of a pool; each prepares all micro-batches of its replica."""

    in_stages = True
    engine: HostEngine
    _cuts: Sequence[Sequence[int]]  # of the coming micro-batches

    def __init__(self, engine: HostEngine, config: TrainConfig, peers: RankGroup, stage: int) -> None:
        super().__init__(engine, peers.rank, stage=stage)
        self._seed, self._peers, self._cut = config.seed, peers, cuts_of(config, engine.module.spec)

    @classmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, division: Division) -> WeightStreamingTrainer:
        rank, topo = torch.distributed.get_rank(), config.model_topo
        pool = next(row for row in topo.along("pipe").tolist() if rank in row)
        stage = pool.index(rank)
        own = division.topology.layers(stage, spec.n_layers)
        device = torch.device(get_accelerator().current_device_name())
        assert isinstance(division, StreamedDivision)
        make = partial(StreamedModel, spec, own, pool, device, division.slots)
        model = build_model(config, spec, folder, own, make, Division(division.topology))
        peers = make_group(topo.along("data"), backend="gloo")  # sums lie on the host
        turns = Turns(model, division.slots, pool)
        return cls(HostEngine(model, config, own, turns, pool, peers), config, peers, stage)

    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        self.engine.begin_step()
        with self.timings("forward_backward"):
            loss = self._run(loader, batch, (self._seed, self.engine.global_steps, self.replica))
        with self.timings("optimizer"):
            self.engine.sum_up()
        self.take_step(self.engine.update)
        return loss

    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        loss = self._run(loader, batch)
        self.engine.module.train()
        return loss

    def write_layers(self, folder: Path, save: Callable[[Any, str], object], disk: Disk) -> None:
        """Write nothing: `HostEngine.save_checkpoint` has written all layers."""

    def on_host(self, loader: Loader, batch: GlobalBatch) -> Iterator[MicroBatch]:
        for (inputs, labels), cuts in zip(super().on_host(loader, batch), self._cuts, strict=True):
            yield inputs, (*labels, *trained_in_chunks(labels[0], cuts))

    def _run(self, loader: Loader, batch: GlobalBatch, seed: tuple[int, ...] | None = None) -> float:
        """Compute a batch, and return the mean loss over all replicas."""
        layouts = loader.layouts(batch, self.replica)
        documents = self.documents(loader, batch)
        self._cuts = [self._cut(*layout) if self._cut else [layout[1]] for layout in layouts]
        shapes = loader.shapes(batch, self.replica)
        like = self.engine.module.activations_like
        of_replicas = (loader.shapes(batch, replica) for replica in range(loader.replicas))
        all_shapes = list(chain.from_iterable(of_replicas))
        sizes = [bytes_of(like(*shape)) for shape in all_shapes]
        kept = self.engine.module.bytes_kept(max(map(prod, all_shapes)))
        sent: Iterator[Any] = self.send(loader, batch)
        if seed:
            sent = self.timings.each("data", sent)
        scale = self.engine.optimizer.loss_scaler.cur_scale
        loss = self.engine.turns.run(Batch(sent, documents, shapes, self._cuts, max(sizes), seed, scale, kept))
        if self._peers.size == 1:
            return loss
        mean = torch.tensor(loss, dtype=torch.float64)
        torch.distributed.all_reduce(mean, group=self._peers.group)
        return float(mean) / self._peers.size
