"""The order in which things are chosen: first what rests on model and data alone, last what a plan finds."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from data.inspection import summary
from data.tokenized.dataset import Dataset, check_vocabulary
from models.api import read_spec
from models.checkpoint.layout import layout_of, resolve
from models.spec import ModelSpec
from training.auto import rules
from training.auto.choices import Choices
from training.auto.machine import Machine
from training.auto.search import Search, precision
from training.config.keys import TrainConfig
from training.data_setup import RecordReader
from training.errors import ConfigError
from training.plan.plan import Plan
from training.plan.rendering import GB, search_table
from training.plan.search import SIZES

ANY_BATCH = 720_720  # until one is chosen: a multiple of all numbers up to 16
SEARCHED = "train_micro_batch_size_per_gpu schedule use_grad_ckpt offload_activations max_seq_len".split()
OFFLOAD = "zero_optimization.offload_optimizer"
DIMS, AXES = "model_topo.process_topology.dims", "model_topo.process_topology.axes"
BATCH = "train_batch_size", "train_micro_batch_size_per_gpu"
# Values that nothing can be said of without others, and, but for the last one, those that go with any grid.
RESTING: dict[str, tuple[tuple[str, ...], list[Any]]] = {
    "model_topo.sequence": ((DIMS,), [1]),
    "model_topo.experts": ((DIMS,), ["columns"]),
    AXES: ((DIMS,), [["pipe", "data"], ["data", "pipe"]]),
    "gradient_accumulation_steps": ((*BATCH, DIMS), [None]),
}
MEANT = {"pipe": "stages", "data": "replicas", "model": "processes to a layer"}


def choose(choices: Choices, machine: Machine, log: Console) -> tuple[list[str], Plan]:
    """Choose all but the three paths, which are there; lines about what was looked at, and the plan.

    Raises:
        ConfigError, CheckpointError, DataError: there is no model, no record, or no room for the run.
    """
    for key, (others, free) in RESTING.items():
        if choices.own.get(key, free[0]) not in free and (
            absent := [each for each in others if not choices.is_own(each)]
        ):
            raise ConfigError(f"{key}: --auto chooses what it rests on; expected beside it {', '.join(absent)}")
    _add_dims(choices, machine)
    if apart := choices.own.get("optimizer.type") == "Adafactor":
        choices.add("zero_optimization.stage", 0, rules.APART)
    config = choices.config(train_batch_size=ANY_BATCH)
    folder = resolve(config.model_path)
    spec = read_spec(folder)
    if not config.from_scratch:
        layout_of(folder)
    if config.stream_gb:
        raise ConfigError("stream_gb: --auto looks at all records before it chooses; expected --config for a stream")
    choices.add("max_seq_len", *rules.longest_sample(spec))
    config = choices.config(train_batch_size=ANY_BATCH)
    reader = RecordReader(config, folder, log)
    data = reader.read("data", config.data_path)
    check_vocabulary(reader.tokenizer, int(spec.config.vocab_size), data)
    log.print(f"records:\n{summary.table(data)}")
    if texts := rules.length_of_texts(data, config.max_seq_len):
        choices.add("max_seq_len", *texts)
    kind, why = (None, rules.APART) if apart else precision(machine.kind)
    if not choices.is_own("bf16") and not choices.is_own("fp16"):
        choices.add(f"{kind or 'bf16'}.enabled", kind is not None, why)
    if "model_topo" in (fixed := _fixed(choices)):
        machine = replace(machine, counts=(config.model_topo.processes,))
    rules.fill(choices, data, spec, config.train_micro_batch_size_per_gpu * math.lcm(*machine.counts))
    plan = _spread(choices, machine, spec, folder, fixed, log)
    what = [f"machine: {machine.name}", f"model: {spec.family.name}, {spec.n_layers} layers"]
    return [*what, *summary.facts(data, config.max_seq_len)], plan


def _add_dims(choices: Choices, machine: Machine) -> None:
    """Where the user says only which parts, as many stages as there are."""
    parts = choices.own.get("model_topo.parts")
    if isinstance(parts, list) and not choices.is_own(DIMS):
        stages = max(1, len(parts) // (2 if choices.own.get("schedule") == "dualpipev" else 1))
        choices.add(DIMS, [stages, max(1, machine.counts[-1] // stages)], "as many stages as your parts")


def _fixed(choices: Choices) -> frozenset[str]:
    """What the search leaves as the user has it."""
    fixed = {key for key in SEARCHED if choices.is_own(key)}
    fixed |= {"model_topo"} if choices.is_own(DIMS) or isinstance(choices.own.get("model_topo.parts"), list) else set()
    return frozenset(fixed | ({"zero_optimization"} if choices.is_own(OFFLOAD) else set()))


def _spread(
    choices: Choices, machine: Machine, spec: ModelSpec, folder: Path, fixed: frozenset[str], log: Console
) -> Plan:
    """Choose how the run is spread, and what it does to fit."""
    datasets: dict[int, Dataset] = {}

    def read(config: TrainConfig) -> Dataset:
        if config.max_seq_len not in datasets:
            found, _ = RecordReader(config, folder, Console(quiet=True)).read_sets()
            assert isinstance(found, Dataset)
            datasets[config.max_seq_len] = found
        return datasets[config.max_seq_len]

    config = choices.config()
    search = Search(machine, spec, read, fixed, log)
    plan = search.best(config)
    log.print(search_table(search.ranking))
    if plan.basis.calibration:
        plan.basis.calibration.write(Path(config.save_path))
    _explain(choices, plan, search.ranking, config.max_seq_len)
    return plan


def _explain(choices: Choices, plan: Plan, ranking: list[Plan], whole: int) -> None:
    """Choose what a plan has.

    Args:
        ranking: the plans that it was the best of.
        whole: tokens of a sample where nothing is given up.
    """
    config, basis = plan.basis.config, plan.basis
    dims, peak = config.model_topo.process_topology.dims, plan.peak / GB
    room = f"{peak:.1f} GB a process at most, of {(basis.device.memory or 0) / GB:.1f} GB"
    others = {str(other.basis.config.model_topo.process_topology.dims): other for other in reversed(ranking)}
    beside = [f"{name} {each.tokens_per_s:,.0f}" for name, each in others.items() if name != str(dims)]
    which = "the fastest" if ranking[0].seconds >= plan.seconds else "the fewest processes of those about as fast"
    topo = config.model_topo
    if topo.tensor > 1:
        choices.add(AXES, topo.process_topology.axes, "several processes share each layer, the last of dims")
    told = f"{' x '.join(MEANT[axis] for axis in topo.process_topology.axes)}, {which} by plan: "
    told += f"{plan.tokens_per_s:,.0f} tokens/s"
    choices.add(DIMS, dims, f"{told}; {', '.join(beside)}" if beside else told)
    if topo.sequence > 1:
        choices.add("model_topo.sequence", topo.sequence, "replicas that share their rows, which are long")
    choices.add("model_topo.parts", plan.parts, "layers of each stage: the slowest one is as fast as can be")
    rows, steps = config.train_micro_batch_size_per_gpu, basis.micro_batches
    told = f"rows at a time, the fastest of {SIZES} that fit; gradients accumulate over {steps} micro-batches"
    choices.add("train_micro_batch_size_per_gpu", rows, told)
    waits = f"{plan.bubble:.0%} of the time is waiting" if plan.bubble > 0 else "nothing waits"
    choices.add("schedule", config.schedule, f"the faster of 1f1b and dualpipev; {waits}")
    saves = "what fits is faster with it" if config.use_grad_ckpt else "activations fit without"
    choices.add("use_grad_ckpt", config.use_grad_ckpt, f"{saves}: {room}")
    if config.zero_optimization.offloads:
        choices.add(f"{OFFLOAD}.device", "cpu", "the optimizer's states do not fit beside the rest")
    if config.offload_activations:
        choices.add("offload_activations", True, "activations do not fit either")
    if config.max_seq_len < whole:
        choices.add("max_seq_len", config.max_seq_len, f"longer samples are cut, as rows of {whole} tokens do not fit")
