"""Values of a config, each with a reason: the user's own, and rules of thumb for what no plan can find.

Keys are dotted, `optimizer.params.lr`. The command line's values come first: all that is chosen later depends on them.
The result is YAML with each reason as a comment. A rule is a starting point whose reason states it in full, so that a
user can disagree with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch

from common.terminal import safe_line
from data.records.record import SPLIT_KIND
from data.tokenized.dataset import Dataset
from models.spec import ModelSpec
from options.planner.commented_yaml import commented, nested
from training.config.keys import TrainConfig
from training.config.section import leaves
from training.config.yaml_file import checked, override
from training.metrics.devices import Device, cpu_has_bf16
from training.usual_rate import usual_rate

YOURS = "yours"
LONGEST = 32_768  # tokens of a sample, where the model is made for more
TEXT = 2048  # tokens of a piece of a long text
STEPS, SMALLEST, LARGEST = 50, 8, 128  # steps of an epoch; least and most samples of a step
EPOCHS = ((10_000, 3), (100_000, 2))  # for fewer samples than that
WARM_UP = 0.03
APART = "Adafactor needs the weights apart"
EVALUATED, LEAST_EVALUATED, MOST_EVALUATED = 0.02, 200, 1000
FASTER = 1.3  # speed of bf16 relative to fp32 that makes it worth while on a CPU
PRODUCTS = 50  # that are timed for it


class Choices:
    """Values chosen so far.

    Args:
        kind: of the config.
        words: `key.sub=value` of the command line.

    Raises:
        ConfigError: a word is malformed.
    """

    def __init__(self, kind: type[TrainConfig], words: list[str]) -> None:
        self._kind, self._words = kind, words
        self._chosen: dict[str, tuple[Any, str]] = {}
        self.own = dict(leaves(self._raw()))  # the user's

    def add(self, key: str, value: Any, reason: str) -> None:
        """Choose a value, unless the user did."""
        self._chosen[key] = value, reason

    def is_own(self, key: str) -> bool:
        """Say whether the user has chosen a key, or something in that section."""
        return any(f"{own}.".startswith(f"{key}.") for own in self.own)

    def config(self, **missing: Any) -> TrainConfig:
        """Make the config.

        Args:
            missing: values of keys that are not chosen yet.

        Raises:
            ConfigError: the user's own values are unusable.
        """
        return checked(self._kind, missing | self._raw(), "command line: ")

    def as_yaml(self, heading: Iterable[str]) -> str:
        """Write a config file.

        Args:
            heading: lines of a comment at the top.
        """
        why = {key: reason for key, (_, reason) in self._chosen.items() if key not in self.own}
        lines = commented(self._raw(), why, otherwise=YOURS)
        return "\n".join([*(f"# {safe_line(line)}" for line in heading), "", *lines]) + "\n"

    def _raw(self) -> dict[str, Any]:
        """Return all values, nested as in YAML."""
        raw = nested({key: value for key, (value, _) in self._chosen.items()})
        for word in self._words:
            override(raw, word)
        return raw


def precision(device: Device) -> tuple[str | None, str]:
    """Choose `bf16`, `fp16` or neither, and say why."""
    if device.reserves:
        return ("bf16", f"{device.name} computes in it") if device.bf16 else ("fp16", f"{device.name} has no bf16")
    if not cpu_has_bf16():
        return None, "this CPU has no instructions for bf16"
    least = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
    for _ in range(PRODUCTS):  # in turn, as other programs come and go
        for dtype in least:
            factors = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 512, dtype=dtype)
            begin = time.perf_counter()
            torch.mm(*factors)
            least[dtype] = min(least[dtype], time.perf_counter() - begin)
    ratio = least[torch.float32] / least[torch.bfloat16]
    why = f"on this CPU a product in bf16 is {ratio:.1f} times as fast as in fp32"
    return ("bf16" if ratio > FASTER else None), why


def sample_length(spec: ModelSpec) -> tuple[int, str]:
    """Choose `max_seq_len` for dialogues: as long as can be, since longer ones are cut."""
    context = spec.context or LONGEST
    made_for = f"the model is made for {context:,} tokens" if spec.context else "the model knows distances only"
    return min(context, LONGEST), made_for if context <= LONGEST else f"{made_for}; --auto looks at no more"


def text_length(data: Dataset, limit: int) -> tuple[int, str] | None:
    """Choose `max_seq_len` where records have long texts, which are split at any length; None where there are none."""
    if not any(tally.split for (_, kind), tally in data.tallies.items() if kind == SPLIT_KIND):
        return None
    others = data.lengths[~data.of_type(SPLIT_KIND)]
    needed = 64 * math.ceil(int(others.max(initial=0)) / 64)
    length = min(limit, max(TEXT, needed))
    return length, f"texts are split into pieces of so many tokens, at least {TEXT:,}; dialogues fit as well as can be"


def fill(choices: Choices, data: Dataset, spec: ModelSpec, unit: int) -> None:
    """Choose all that follows from the model's size and the number of samples.

    Args:
        unit: a batch is a multiple of this.
    """
    # The batch by the number of samples, or of rows that are packed of them.
    samples = counted = len(data)
    config, what = choices.config(train_batch_size=unit), "samples"
    if config.packing == "dataset":
        counted, what = math.ceil(data.lengths.sum() / (config.pack_len or config.sample_limit)), "packed rows"
    batch = 2 ** round(math.log2(min(max(counted / STEPS, SMALLEST), LARGEST)))
    why = f"some {STEPS} steps an epoch, {SMALLEST} to {LARGEST} {what}, a multiple of {unit} for the processes"
    choices.add("train_batch_size", unit * math.ceil(batch / unit), why)

    texts = data.types == [SPLIT_KIND]
    epochs = 1 if texts else next((epochs for fewer, epochs in EPOCHS if samples < fewer), 1)
    of = "texts: once" if texts else f"{samples:,} samples: 3 times below 10,000, twice below 100,000, else once"
    choices.add("n_epoches", epochs, of)

    lr, why = usual_rate(choices.config(), spec)
    choices.add("optimizer.type", "AdamW", "the usual one; Lion takes a third less memory and another lr")
    choices.add("optimizer.params.lr", lr, why)
    if not choices.is_own("optimizer.type"):  # which may have none
        choices.add("optimizer.params.betas", [0.9, 0.95], "usual for language models")
    choices.add("optimizer.params.weight_decay", 0.01, "little, as the model is trained already")
    choices.add("optimizer.no_wd_kws", ["norm", "bias$"], "no decay of norms and biases, as usual")
    if choices.own.get("optimizer.type") != "Adafactor":
        choices.add("zero_optimization.stage", 1, "shards the optimizer's states over the replicas of a stage")

    share = min(EVALUATED, MOST_EVALUATED / samples) if samples >= LEAST_EVALUATED else 0.0
    limits = f"at most {MOST_EVALUATED:,}, none of fewer than {LEAST_EVALUATED}"
    why = f"{EVALUATED:.0%} of the samples are not trained on but measured on, {limits}: here {share * samples:.0f}"
    if not choices.is_own("eval_data_path"):
        choices.add("eval_share", float(f"{share:.2g}"), why)

    # The schedule by the number of steps that come of all this.
    config = choices.config()
    steps = config.max_steps or config.n_epoches * math.ceil(
        counted * (1 - config.eval_share) / config.train_batch_size
    )
    warm_up = max(1, round(WARM_UP * steps))
    choices.add("scheduler.type", "WarmupCosineLR", "falls slowly, then fast, then slowly; the usual one")
    choices.add("scheduler.params.warmup_num_steps", warm_up, f"{WARM_UP:.0%} of some {steps:,} steps")
    if not choices.is_own("scheduler.type"):  # which may not know it
        choices.add("scheduler.params.cos_min_ratio", 0.1, "ends at a tenth of the rate")
    choices.add("save_minutes", 30.0, "a run that is killed loses at most this; it is saved at its end too")
