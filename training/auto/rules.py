"""Rules of thumb for what no plan can find: lengths, batch, epochs, learning rate, warm-up, what is held out.

Each is a starting point that its reason states in full, so that a user can disagree with it.
"""

from __future__ import annotations

import math

from data.tokenized.columns import SPLIT_KIND
from data.tokenized.dataset import Dataset
from models.spec import ModelSpec
from training.auto.choices import Choices

LONGEST = 32_768  # tokens of a sample that are looked at, where the model is made for more
TEXT = 2048  # tokens of a piece of a long text
STEPS, SMALLEST, LARGEST = 50, 8, 128  # an epoch has so many steps, of so many samples at least and at most
EPOCHS = ((10_000, 3), (100_000, 2))  # for fewer samples than that
LR, LR_OF, SLOWEST, FASTEST = 2e-5, 7e9, 5e-6, 2e-4
WARM_UP = 0.03
APART = "Adafactor needs the weights apart"
EVALUATED, LEAST_EVALUATED, MOST_EVALUATED = 0.02, 200, 1000


def longest_sample(spec: ModelSpec) -> tuple[int, str]:
    """`max_seq_len` for dialogues: what is longer is cut, so it is as long as can be."""
    context = spec.context or LONGEST
    made_for = f"the model is made for {context:,} tokens" if spec.context else "the model knows distances only"
    return min(context, LONGEST), made_for if context <= LONGEST else f"{made_for}; --auto looks at no more"


def length_of_texts(data: Dataset, limit: int) -> tuple[int, str] | None:
    """`max_seq_len` where long texts are among the records, which any length divides; None where there are none."""
    if not any(tally.split for (_, kind), tally in data.tallies.items() if kind == SPLIT_KIND):
        return None
    others = data.lengths[~data.of_type(SPLIT_KIND)]
    needed = 64 * math.ceil(int(others.max(initial=0)) / 64)
    length = min(limit, max(TEXT, needed))
    return length, f"texts are split into pieces of so many tokens, at least {TEXT:,}; dialogues fit as well as can be"


def fill(choices: Choices, data: Dataset, spec: ModelSpec, unit: int) -> None:
    """Choose all that the model's size and the number of samples decide.

    Args:
        unit: samples, of which a batch has to be a multiple.
    """
    weights = sum(shape.numel() for layer in range(spec.n_layers) for shape in spec.shapes(layer).values())
    if spec.tied:
        weights -= spec.shapes(0)[spec.family.tie.embedding].numel()
    samples = counted = len(data)
    config, what = choices.config(train_batch_size=unit), "samples"
    if config.packing == "dataset":
        counted, what = math.ceil(data.lengths.sum() / (config.pack_len or config.max_seq_len)), "packed rows"
    batch = 2 ** round(math.log2(min(max(counted / STEPS, SMALLEST), LARGEST)))
    why = f"some {STEPS} steps an epoch, {SMALLEST} to {LARGEST} {what}, a multiple of {unit} for the processes"
    choices.add("train_batch_size", unit * math.ceil(batch / unit), why)
    texts = data.types == [SPLIT_KIND]
    epochs = 1 if texts else next((epochs for fewer, epochs in EPOCHS if samples < fewer), 1)
    of = "texts: once" if texts else f"{samples:,} samples: 3 times below 10,000, twice below 100,000, else once"
    choices.add("n_epoches", epochs, of)
    lr = min(max(LR * math.sqrt(LR_OF / weights), SLOWEST), FASTEST)
    why = (
        f"2e-5 at 7B weights, more for smaller models by the root of the size, at most 2e-4: {weights / 1e9:.2g}B here"
    )
    choices.add("optimizer.type", "AdamW", "the usual one; Lion takes a third less memory and another lr")
    choices.add("optimizer.params.lr", float(f"{lr:.1g}"), why)
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
    config = choices.config()
    steps = config.max_steps or config.n_epoches * math.ceil(
        counted * (1 - config.eval_share) / config.train_batch_size
    )
    warm_up = max(1, round(WARM_UP * steps))
    choices.add("scheduler.type", "WarmupCosineLR", "falls slowly, then fast, then slowly; the usual one")
    choices.add("scheduler.params.warmup_num_steps", warm_up, f"{WARM_UP:.0%} of some {steps:,} steps")
    if not choices.is_own("scheduler.type"):  # which may not know it
        choices.add("scheduler.params.cos_min_ratio", 0.1, "ends at a tenth of the rate")
    choices.add("save_minutes", 30.0, "a run that is killed loses so much at most; it is saved at its end too")
