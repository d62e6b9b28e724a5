"""A micro-batch through shares of a model and through the whole one: started by the real launcher.

usage: tensor_shares.py CASES.json, a list of {"folder", "dtype", "spread", "short", "grouped", "own", "z_loss",
"dropout", "fault"}; writes outcomes.json beside it: for each case the two losses, how far each gradient is from that of
the whole model, in parts of its largest number, how many sums were made in the forward and in the backward pass, and
what part of the weights this process holds. A case with "prompts" and "count" is generated instead; its outcome is each
rank's tokens, or what it refused, and how many weights of the blocks it holds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from models import CheckpointError
from models.api import load_share, read_spec
from models.causal_lm import CausalLM
from models.checkpoint.source import open_source
from models.loss.micro_batch import micro_batch_loss
from models.parallel import groups as collectives
from models.parallel.groups import RankGroup
from models.parallel.tensor import TensorShare
from models.router import n_experts
from tests.models.adapters import adapted_source
from tests.workers.leaving import leave
from training.distributed.processes import gather

IGNORED = -100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    path = parser.parse_args().cases
    distributed.init_process_group("gloo")
    outcomes = [run_case(case) for case in json.loads(path.read_text())]
    if distributed.get_rank() == 0:
        (path.parent / "outcomes.json").write_text(json.dumps(outcomes))
    leave()


def micro_batch(short: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and labels of two rows: one of two documents, and one that is padded; or one row of two tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 512, (2, 24), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(10), torch.arange(14)]), torch.arange(24)])
    positions[1, 19:] = -1 - positions[1, 19:]
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, IGNORED)
    labels[0, 10] = labels[1, 19:] = IGNORED
    if short:
        return ids[:1, :2], positions[:1, :2], ids[:1, :2]
    return ids, positions, labels


def squared(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss of a user's own."""
    return (logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0]) ** 2


def loss_of(model: CausalLM, case: dict[str, Any]) -> Tensor:
    ids, positions, labels = micro_batch(case.get("short", False))
    stream: tuple[Tensor, ...] = (ids, positions)
    model.head.project_in_loss = True
    for layer in model.layers:
        stream = layer(stream)
    weights = {"z_loss_weight": case.get("z_loss", 0.0), "own": squared if case.get("own") else None}
    router_loss = 0.5 if model.spec.family.router else 0.0
    expected = (labels, torch.tensor(0.1), torch.tensor(1.0))
    return micro_batch_loss(model.head, stream, expected, router_loss_weight=router_loss, **weights)


def run_dropout(case: dict[str, Any]) -> dict[str, Any]:
    """Two passes from one random state, the second of which recomputes: losses of all ranks, and who dropped what."""
    spec = read_spec(Path(case["folder"]))
    spec.config.attention_dropout = spec.config.hidden_dropout = 0.3
    source, group = open_source(Path(case["folder"]), spec), distributed.group.WORLD
    share = TensorShare(spec, RankGroup(distributed.get_world_size(), distributed.get_rank(), group))
    model = CausalLM(spec, source, torch.float32, torch.device("cpu"), share=share).train()
    drawn: list[int] = []

    def draws(_: object, inputs: object, output: Tensor) -> None:
        drawn.append(int((output == 0).nonzero().sum()) if is_bloom else int(torch.randint(2**40, ())))

    is_bloom = spec.family.name == "bloom"  # whose random numbers are a module's, and not all of attention's
    first(model, "attention_dropout" if is_bloom else "o_proj").register_forward_hook(draws)
    losses, gradients = [], []
    for recompute in (False, True):
        for block in model.blocks:
            block.recompute = recompute
        torch.manual_seed(5)
        model.zero_grad()
        loss = loss_of(model, case)
        loss.backward()
        losses.append(loss.item())
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    same = all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    return {"ranks": gather((losses, drawn[0], same))}


def generate(case: dict[str, Any]) -> dict[str, Any]:
    from options.demo.generation import Request, generate_many

    group = distributed.group.WORLD
    assert group
    try:
        model = load_share(case["folder"], group)
    except CheckpointError as error:
        return {"refused": str(error)}
    requests = [Request(prompt, case["count"], set()) for prompt in case["prompts"]]
    for _ in generate_many(model, requests, rows=2):
        pass
    held = sum(parameter.numel() for block in model.blocks for parameter in block.parameters())
    return {"texts": [request.text for request in requests], "held": held}


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    if case.get("prompts"):
        return {"ranks": gather(generate(case))}
    if case.get("dropout"):
        return run_dropout(case)
    size, rank = distributed.get_world_size(), distributed.get_rank()
    spec = read_spec(Path(case["folder"]))
    if case.get("grouped"):
        spec.config._experts_implementation = "grouped_mm"  # as on a GPU
    source: Any = open_source(Path(case["folder"]), spec)
    if case.get("adapted"):
        spec, source = adapted_source(spec, Path(case["folder"]))
    dtype = getattr(torch, case.get("dtype", "float32"))
    share = TensorShare(spec, RankGroup(size, rank, distributed.group.WORLD), case.get("spread", False))
    model = CausalLM(spec, source, dtype, torch.device("cpu"), share=share).train()
    whole = CausalLM(spec, source, dtype, torch.device("cpu")).train()
    for block in (*model.blocks, *whole.blocks):
        block.recompute = case.get("recompute", False)
    if fault := case.get("fault"):
        FAULTS[fault](model)
    forward = Counted(lambda: loss_of(model, case))
    backward = Counted(forward.result.backward)
    expected = loss_of(whole, case)
    expected.backward()
    far = {}
    for (name, weight), (_, reference) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        if not reference.requires_grad:
            assert weight.grad is None, name
            continue
        assert weight.grad is not None and reference.grad is not None, name
        found, cut = weight.grad, share.shard(name.removeprefix("layers."))
        if cut:
            found = torch.zeros_like(reference)
            cut.put(weight.grad, found)
            collectives.add_up(found, share.ranks)
        largest = reference.grad.abs().max().clamp(min=1e-12)
        far[name] = float((found - reference.grad).abs().max() / largest)
    held = sum(weight.numel() for weight in model.parameters()) / sum(weight.numel() for weight in whole.parameters())
    return {
        "loss": forward.result.item(),
        "expected": expected.item(),
        "far": far,
        "sums": [forward.sums, backward.sums],
        "held": held,
        "experts": n_experts(spec.config),
    }


class Counted:
    """What something gives, and how many sums the processes made meanwhile."""

    def __init__(self, work: Callable[[], Any]) -> None:
        plain, self.sums = distributed.all_reduce, 0

        def count(*arguments: Any, **named: Any) -> Any:
            self.sums += 1
            return plain(*arguments, **named)

        distributed.all_reduce = count
        try:
            self.result = work()
        finally:
            distributed.all_reduce = plain


def first(model: CausalLM, name: str) -> Any:
    return next(module for path, module in model.blocks[0].named_modules() if path.endswith(name))


def forget_copy(model: CausalLM) -> None:
    """The gradient of the attention's input is that of this process's heads alone."""
    first(model, "self_attn")._forward_pre_hooks = {}


def forget_norm(model: CausalLM) -> None:
    """The gradient of a norm of this process's heads is not added up."""
    first(model, "q_norm").weight._backward_hooks.clear()


def other_head(model: CausalLM) -> None:
    """A process takes its words for others."""
    model.head.ranks = RankGroup(model.head.ranks.size, 0, model.head.ranks.group)


def forget_factor(model: CausalLM) -> None:
    """The gradient of a factor that lies whole on each process is not added up."""
    first(model, "q_proj").lora_A._backward_hooks.clear()


FAULTS = {"factor": forget_factor, "copy": forget_copy, "norm": forget_norm, "head": other_head}


if __name__ == "__main__":
    main()
