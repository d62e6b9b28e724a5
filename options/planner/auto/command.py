"""Entry point of `train_ds.py --auto --model DIR --data FILE --save DIR`: choose a config, and write it with its plan.

First comes what follows from model and data alone, last what a plan finds. The file is `auto.yml` in the run's folder.
It is never written anew: a second start uses it as it stands, the user's changes included. Cost: the records are
tokenized, which the run then need not do; on a CPU layers are timed, for ten seconds or, of a large model, minutes.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rich.console import Console

from common.log import Log
from common.quantities import counted, gigabytes
from common.whole_files import replace_text
from data.inspection import summary
from data.paths import with_home
from data.records.sources import as_sources
from data.tokenized.dataset import Dataset, check_vocabulary
from models.api import read_spec
from models.checkpoint.hub import find_model
from models.checkpoint.layout import layout_of
from models.errors import CheckpointError
from options.planner.auto.choices import APART, Choices, fill, precision, sample_length, text_length
from options.planner.auto.search import Machine, Search
from options.planner.command import WIDTH, show
from options.planner.own_plan import own_planner
from options.planner.plan import Plan
from options.planner.row_chunks import chunk_of
from options.planner.search import SIZES
from options.planner.tables import plan_summary, search_table
from options.row_chunks.keys import KEY
from training.config.keys import TrainConfig
from training.config.yaml_file import load_config_of
from training.data_setup import RecordReader
from training.errors import ConfigError
from training.option import model_for
from training.preflight import check_writable

FILE = "auto.yml"
OF_A_RUN = ("config.yml", "latest")  # files of a run's folder
ANY_BATCH = 720_720  # until one is chosen; a multiple of all numbers up to 16
SEARCHED = (
    "train_micro_batch_size_per_gpu schedule use_grad_ckpt offload_activations offload_gradients max_seq_len row_chunk"
).split()
OFFLOAD = "zero_optimization.offload_optimizer"
DIMS = "model_topo.process_topology.dims"
AXIS_NAMES = {"pipe": "stages", "data": "replicas", "model": "processes to a layer"}


def configure(kind: type[TrainConfig], arguments: argparse.Namespace, hosts: dict[str, list[int]] | None) -> Path:
    """Return the config file of a run: that of an earlier start, or a new one.

    Args:
        kind: of the config.

    Raises:
        ConfigError, CheckpointError, DataError: no model, no record, or not enough memory.
    """
    # A shell leaves ~ as it is behind = and in quotes.
    arguments.save, arguments.model, *arguments.data = map(
        with_home, (arguments.save, arguments.model, *arguments.data)
    )
    choices = Choices(kind, arguments.overrides)
    for key, option in (("model_path", "--model"), ("save_path", "--save")):
        if key in choices.own:
            raise ConfigError(f"command line: {key}: given by {option}; remove it here")
    log = Log(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    save = Path(arguments.save)
    path = save / FILE
    if path.exists():
        _check_same(load_config_of(kind, path), path, arguments, "data_path" in choices.own)
        log.print(f"auto: {path} is there, so the run goes on with it as it stands; remove it to choose anew")
        return path
    check_writable("--save", save)
    if found := [name for name in OF_A_RUN if (save / name).exists()]:
        raise ConfigError(f"--save: {save} holds a run that --auto did not begin ({found[0]}); expected another folder")
    choices.add("model_path", arguments.model, "--model")
    choices.add("data_path", arguments.data, "--data")
    choices.add("save_path", str(save), "--save")
    lines, plan = choose_config(choices, Machine.find(hosts, arguments.devices), log, trains=not arguments.dry_run)
    text = choices.as_yaml(["Chosen by train_ds.py --auto; beside each value why.", *lines, *plan_summary(plan)])
    show(plan, log)
    replace_text(path, text)
    log.print(f"{path}:\n{text}")
    return path


def _check_same(config: TrainConfig, path: Path, arguments: argparse.Namespace, own_data: bool) -> None:
    """Check that an earlier start's config is for this model, these data and this folder.

    Args:
        own_data: whether the command line overrides data_path.
    """
    paths = (source.path for source in as_sources(config.data_path))
    data = list(map(with_home, chain.from_iterable([path] if isinstance(path, str) else path for path in paths)))
    for name, given, known in (
        ("model", [arguments.model], [config.model_path]),
        ("data", arguments.data, arguments.data if own_data else data),
        ("save", [arguments.save], [config.save_path]),
    ):
        if list(map(os.path.normpath, given)) != list(map(os.path.normpath, known)):
            found = f"{', '.join(given)}, but {path} has {', '.join(known)}"
            raise ConfigError(f"--{name}: {found}; expected the same, or another --save")


def choose_config(choices: Choices, machine: Machine, log: Console, trains: bool = True) -> tuple[list[str], Plan]:
    """Choose all but the three paths; return lines about machine, model and data, and the plan.

    Args:
        trains: whether the run follows; without it config.json and the tokenizer are enough.

    Raises:
        ConfigError, CheckpointError, DataError: no model, no record, or not enough memory.
    """
    beside = [key for key in ("train_batch_size", SEARCHED[0], DIMS) if not choices.is_own(key)]
    if beside and choices.own.get("gradient_accumulation_steps"):
        problem = "gradient_accumulation_steps: --auto chooses what it depends on"
        raise ConfigError(f"{problem}; expected beside it {', '.join(beside)}")

    parts = choices.own.get("model_topo.parts")
    if isinstance(parts, list) and not choices.is_own(DIMS):
        stages = max(1, len(parts) // (2 if choices.own.get("schedule") == "dualpipev" else 1))
        choices.add(DIMS, [stages, max(1, machine.counts[-1] // stages)], "as many stages as your parts")
    if apart := choices.own.get("optimizer.type") == "Adafactor":
        choices.add("zero_optimization.stage", 0, APART)
    config = choices.config(train_batch_size=ANY_BATCH)

    # The model first: what of it cannot be trained is refused before the records are read.
    folder = find_model(config.model_path, weights=trains and not config.from_scratch)
    spec = read_spec(folder)
    if not config.from_scratch:
        _check_weights(folder, trains, log)
    if key := config.windows_key:
        raise ConfigError(f"{key}: --auto looks at all records before it chooses; expected --config for a stream")
    if own_planner(config):
        raise ConfigError(f"schedule: --auto chooses among pipelines; expected --config for {config.schedule}")

    choices.add("max_seq_len", *sample_length(spec))
    config = choices.config(train_batch_size=ANY_BATCH)
    reader = RecordReader(config, folder, log)
    data = reader.read("data", config.data_path)
    check_vocabulary(reader.tokenizer, int(spec.config.vocab_size), data)
    spec = model_for(config, spec, [data])
    log.print(f"records:\n{summary.table(data)}")
    if texts := text_length(data, config.max_seq_len):
        choices.add("max_seq_len", *texts)

    kind, why = (None, APART) if apart else precision(machine.kind)
    if not choices.is_own("bf16") and not choices.is_own("fp16"):
        choices.add(f"{kind or 'bf16'}.enabled", kind is not None, why)

    # What the user chose is not searched.
    fixed = {key for key in SEARCHED if choices.is_own(key) and getattr(config, key) != "auto"}
    if choices.is_own(OFFLOAD):
        fixed.add("zero_optimization")
    if choices.is_own(DIMS) or isinstance(parts, list):
        fixed.add("model_topo")
        processes, kinds = config.model_topo.processes, machine.kind
        if kinds.each and processes != len(kinds.each):
            raise ConfigError(f"{DIMS}: {processes} processes on {kinds.name}; expected one on each, {len(kinds.each)}")
        machine = replace(machine, counts=(processes,))

    fill(choices, data, spec, config.micro_batch_size * math.lcm(*machine.counts))
    plan = _choose_topology(choices, Search(machine, spec, _reader(folder), frozenset(fixed), log))
    what = [f"machine: {machine.name}", f"model: {spec.family.name}, {spec.n_layers} layers"]
    return [*what, *summary.facts(data, config.max_seq_len)], plan


def _check_weights(folder: Path, trains: bool, log: Console) -> None:
    """Refuse a folder without weights, or say that training is going to need them."""
    try:
        layout_of(folder)
    except CheckpointError as error:
        if trains:
            raise
        log.print(f"weights: not needed for --dry-run, but to train: {error}")


def _reader(folder: Path) -> Callable[[TrainConfig], Dataset]:
    """Return a function that reads a config's records, once for each length."""
    datasets: dict[int, Dataset] = {}

    def read(config: TrainConfig) -> Dataset:
        if config.max_seq_len not in datasets:
            found, _ = RecordReader(config, folder, Console(quiet=True)).read_sets()
            assert isinstance(found, Dataset)
            datasets[config.max_seq_len] = found
        return datasets[config.max_seq_len]

    return read


def _choose_topology(choices: Choices, search: Search) -> Plan:
    """Choose topology, and what to give up to fit, with reasons."""
    whole = choices.config()
    ranking = search.rank(whole)
    plan = search.choose(ranking)
    search.log.print(search_table(ranking))
    config, basis, topo = plan.basis.config, plan.basis, plan.basis.config.model_topo
    if basis.calibration:
        basis.calibration.write(Path(config.save_path))

    dims, axes = topo.process_topology.dims, topo.process_topology.axes
    speeds = {str(each.basis.config.model_topo.process_topology.dims): each.tokens_per_s for each in reversed(ranking)}
    which = "the fastest" if ranking[0].seconds >= plan.seconds else "the fewest processes of those about as fast"
    if topo.tensor > 1:
        choices.add("model_topo.process_topology.axes", axes, "several processes share each layer, the last of dims")

    why = f"{' x '.join(AXIS_NAMES[axis] for axis in axes)}, {which} by plan: {plan.tokens_per_s:,.0f} tokens/s"
    beside = [f"{name} {speed:,.0f}" for name, speed in speeds.items() if name != str(dims)]
    choices.add(DIMS, dims, f"{why}; {', '.join(beside)}" if beside else why)
    if topo.sequence > 1:
        choices.add("model_topo.sequence", topo.sequence, "replicas that share their rows, which are long")

    choices.add("model_topo.parts", plan.parts, "layers of each stage: the slowest one is as fast as can be")

    rows, steps = config.micro_batch_size, basis.micro_batches
    why = f"rows at a time, the fastest of {SIZES} that fit; gradients accumulate over {counted(steps, 'micro-batch')}"
    choices.add("train_micro_batch_size_per_gpu", rows, why)

    waits = f"{plan.bubble:.0%} of the time is waiting" if plan.bubble > 0 else "nothing waits"
    choices.add("schedule", config.schedule, f"the faster of 1f1b and dualpipev; {waits}")
    saves = "what fits is faster with it" if config.use_grad_ckpt else "activations fit without"
    full = plan.fullest
    room = f"{gigabytes(full.memory.peak)} a process at most, of {gigabytes(full.device.memory or 0)}"
    choices.add("use_grad_ckpt", config.use_grad_ckpt, f"{saves}: {room}")

    if chunk := chunk_of(config):
        chunks = f"{len(basis.longest_chunks)} chunks of the longest rows"
        choices.add(KEY, chunk, f"tokens: {chunks} pass the stages one after the other, faster by plan than whole rows")

    # What the plan gave up for memory.
    if config.zero_optimization.offloads:
        choices.add(f"{OFFLOAD}.device", "cpu", "the optimizer's states do not fit beside the rest")
    if config.offload_activations:
        choices.add("offload_activations", True, "activations do not fit either")
    if config.offload_gradients:
        choices.add("offload_gradients", True, "nor do the sums of gradients")
    if config.max_seq_len < whole.max_seq_len:
        rows_of = f"rows of {whole.max_seq_len} tokens"
        choices.add("max_seq_len", config.max_seq_len, f"longer samples are cut, as {rows_of} do not fit")
    return plan
