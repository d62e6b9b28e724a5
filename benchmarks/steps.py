"""Train in timed steps, by Pipetune or by transformers' Trainer."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import SequentialSampler

from data.loader import GlobalBatch, Loader
from data.sample_set import InMemory, SampleSet
from options import RunConfig
from options.timeline.recorder import Record, Recorder
from options.weight_streaming.schedule import Slot, Slots, simulate_turns
from options.weight_streaming.turns import slots_of
from training.batches import build_loader
from training.config.keys import TrainConfig
from training.distributed import joining, processes
from training.engine.trainer import Trainer
from training.schedule.instructions import WORK, Meaning, read_schedule
from training.schedule.walk import Program, walk

if TYPE_CHECKING:
    from transformers import TrainerCallback

MOST_STEPS = 12  # of transformers' Trainer
Figures = Callable[[], dict[str, Any]]


class Pace(Protocol):
    """Starts the steps of a worker and takes their times."""

    def wait(self) -> bool:
        """Wait until the next step shall begin; False where none shall."""

    def done(self, seconds: float, tokens: int, **more: Any) -> None:
        """Take a step's seconds and its tokens that are not padding."""


def run_config(folder: Path, rows: int, length: int, **keys: Any) -> RunConfig:
    """Make the config of a run that trains the model of a folder from scratch, on `rows` rows a step.

    Args:
        keys: more of a config's keys.
    """
    shape = {"max_seq_len": length, "train_batch_size": rows}
    paths = {"model_path": str(folder), "save_path": str(folder), "data_path": ""}
    return RunConfig.model_validate(paths | shape | {"from_scratch": True} | keys)


def save_random_model(folder: Path) -> None:
    """Give the model of a folder's config.json random weights, for runs that do not begin from scratch."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


def topology(*dims: int, **more: Any) -> dict[str, Any]:
    """Make the `model_topo` key of N stages and M replicas, and whatever is below that key besides."""
    return {"model_topo": {"process_topology": {"dims": list(dims)}} | more}


def random_rows(words: int, rows: int, length: int, pairs: bool = False) -> InMemory:
    """Make full rows of random words, the same on every rank; as `pairs` each row is two documents."""
    torch.manual_seed(0)
    ids = torch.randint(0, words, (rows, length)).tolist()
    return InMemory([{"input_ids": row, "labels": row, "first": length // 2 if pairs else 0} for row in ids])


@contextmanager
def joined(config: TrainConfig) -> Iterator[processes.ProcessInfo]:
    """Join the other processes of the run."""
    process = processes.ProcessInfo.from_environment()
    assert process is not None
    joining.join(process)
    yield process
    joining.stop()


def train(trainer: Trainer, loader: Loader, pace: Pace, figures: Figures = dict) -> None:
    """Make steps at a pace.

    Args:
        figures: more figures of the last step.
    """
    for step in count():
        if not pace.wait():
            return
        batch = loader.batch(step)
        begin = now()
        loss = trainer.train_step(loader, batch)
        pace.done(now() - begin, batch.tokens, loss=loss, **figures())


def time_turns(trainer: Trainer, slots: Slots, micro_batches: int) -> Callable[[], tuple[float, float]]:
    """Record the turns of each step of weight streaming.

    Returns:
        what all ranks call together after a step: a process's share of the seconds that all computed in turns, and the
        seconds that the simulation gives a step with these turns, which counts no update of the weights.
    """
    records = _recorded(trainer)

    def figures() -> tuple[float, float]:
        found: dict[int, list[float]] = defaultdict(list)
        for record in chain(*processes.gather(records())):
            found[record.span.stage].append(record.span.end - record.span.begin)
        ranks = torch.distributed.get_world_size()
        timed = [Slot(mean(found[number]), share=slot.share) for number, slot in enumerate(slots_of(slots))]
        work = sum(map(sum, found.values())) / ranks
        return work, simulate_turns(timed, ranks, micro_batches, slots.a_round, math.inf).seconds

    return figures


def lasting(trainer: Trainer, seconds: Sequence[Sequence[float]]) -> Trainer:
    """Let this process sleep so that each pass lasts as long as on a slower device.

    Args:
        seconds: of a forward and a backward pass, by stage; nothing changes without.
    """
    plain = trainer.engine._INSTRUCTION_MAP

    def lasts(execute: Callable[..., Any], least: float) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> None:
            begin = now()
            execute(*arguments, **named)
            time.sleep(max(0.0, least - (now() - begin)))

        return run

    kinds = {kind.__name__: kind for kind in plain}
    of_stage = zip(("ForwardPass", "BackwardPass"), seconds[trainer.stage] if seconds else (), strict=False)
    passes = {kinds[name]: lasts(plain[kinds[name]], least) for name, least in of_stage}
    trainer.engine._INSTRUCTION_MAP = plain | passes
    return trainer


def time_passes(trainer: Trainer) -> Callable[[], tuple[float, float]]:
    """Record the passes of each step of a pipeline.

    Returns:
        what all ranks call together after a step: a process's share of the seconds that all computed in passes, and the
        seconds that the step's own schedule takes where each stage's passes take their mean and messages no time.
    """
    records = _recorded(trainer)

    def figures() -> tuple[float, float]:
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        for record in chain(*processes.gather(records())):
            if record.span.kind in WORK:
                found[record.span.kind, record.span.stage].append(record.span.end - record.span.begin)
        ranks = torch.distributed.get_world_size()
        seconds = {}
        for kind in ("forward", "backward"):
            seconds[kind] = [mean(found[kind, stage]) for stage in range(ranks)]

        own = [meaning for _, meaning in read_schedule(trainer.engine._train_schedule())]
        programs = [_program(filter(None, each)) for each in processes.gather(own)]
        return sum(map(sum, found.values())) / ranks, walk(programs, seconds).seconds

    return figures


def _program(meanings: Iterable[Meaning]) -> Program:
    """Do what a rank of 1F1B does: each message waits for its other end."""
    for meaning in meanings:
        if meaning.message:
            yield [meaning.message]
            yield None
        elif meaning.kind in WORK:
            yield meaning


def _recorded(trainer: Trainer) -> Callable[[], list[Record]]:
    """Let a trainer record its steps; return what gives this rank's records of the last one."""
    recorder, step = Recorder(torch.distributed.get_rank(), trainer.engine.device, 0.0), trainer.train_step
    records: list[Record] = []

    def recorded(loader: Loader, batch: GlobalBatch) -> float:
        nonlocal records
        with recorder.step(trainer.engine) as records:
            return step(loader, batch)

    trainer.train_step = recorded  # type: ignore[method-assign]
    return lambda: records


def now() -> float:
    """Return the time at which the device has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def clock_of(pace: Pace, tokens: Callable[[int], int], figures: Figures = dict) -> TrainerCallback:
    """Make a callback of transformers' Trainer that times each step, the making of its batch included.

    Args:
        tokens: in the batch of a step, counted from 0, without padding.
        figures: more figures of the last step.
    """
    from transformers import TrainerCallback, TrainerControl, TrainingArguments

    class Clock(TrainerCallback):
        def on_train_begin(self, arguments: TrainingArguments, state: Any, control: TrainerControl, **_: Any) -> None:
            control.should_training_stop = not pace.wait()
            self.begin = now()

        def on_step_end(self, arguments: TrainingArguments, state: Any, control: TrainerControl, **_: Any) -> None:
            self.seconds = now() - self.begin

        def on_log(self, arguments: TrainingArguments, state: Any, control: TrainerControl, **named: Any) -> None:
            if loss := named["logs"].get("loss"):  # after each step, and once without at the end
                pace.done(self.seconds, tokens(state.global_step - 1), loss=float(loss), **figures())
                self.on_train_begin(arguments, state, control)

    return Clock()


def train_by_transformers(
    config: TrainConfig,
    samples: SampleSet,
    pace: Pace,
    micro_batch: int,
    liger: bool = False,
    figures: Figures = dict,
    prepare: Callable[[Any], Any] | None = None,
    **more: Any,
) -> None:
    """Train as the documentation of transformers' Trainer has it.

    Args:
        micro_batch: samples in a micro-batch, padded to the longest by transformers' own collator.
        liger: patch the model with Liger's kernels.
        figures: more figures of the last step.
        prepare: gets the model and returns the one to train, such as one with adapters.
        more: arguments of the Trainer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer

    class InOrder(Trainer):
        """Takes the samples as they come."""

        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    loader = build_loader(samples, config)
    tokenizer = AutoTokenizer.from_pretrained(config.model_path)
    tokenizer.pad_token = tokenizer.eos_token
    if config.from_scratch:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model_path))
    else:
        model = AutoModelForCausalLM.from_pretrained(config.model_path, dtype=torch.float32)
    if config.use_grad_ckpt:
        model.config.use_cache = False
    arguments = trainer_arguments(config, micro_batch, use_liger_kernel=liger, **more)
    InOrder(
        prepare(model) if prepare else model,
        arguments,
        DataCollatorForSeq2Seq(tokenizer),
        train_dataset=_shuffled_rows(loader),
        callbacks=[clock_of(pace, lambda step: loader.batch(step).tokens, figures)],
    ).train()


def trainer_arguments(config: TrainConfig, micro_batch: int, kind: Any = None, **more: Any) -> Any:
    """Make a Trainer's arguments of a config.

    Args:
        kind: of arguments; transformers' where absent.
    """
    from transformers import TrainingArguments

    return (kind or TrainingArguments)(
        output_dir=config.save_path,
        max_steps=MOST_STEPS,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=config.train_batch_size // micro_batch,
        gradient_checkpointing=config.use_grad_ckpt is True,
        bf16=config.bf16.enabled,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def in_order(loader: Loader) -> list[int]:
    """List the samples of all steps, those of a step shuffled; a Loader sorts them by length."""
    generator = torch.Generator().manual_seed(0)
    order = []
    for step in range(MOST_STEPS):
        numbers = loader.batch(step).samples
        order += [numbers[place] for place in torch.randperm(len(numbers), generator=generator)]
    return order


def _shuffled_rows(loader: Loader) -> list[dict[str, list[int]]]:
    """Return what the Trainer reads."""
    rows = []
    for number in in_order(loader):
        sample = loader.data.samples[number]
        rows.append({key: torch.as_tensor(sample[key]).tolist() for key in ("input_ids", "labels")})
    return rows
