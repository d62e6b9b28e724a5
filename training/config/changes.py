"""Compare a config with that of a checkpoint, by the rules in `CHANGES`.

A key below a section has the rule of the section, unless it has one of its own. Each checkpoint records the values that
count (`settings_of`), and a start compares its own with them (`compare`). Where something else than the value counts,
as the samples that come of `data_path`, `training.checkpoint.resume` compares that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from training.config.section import leaves
from training.errors import ConfigError

if TYPE_CHECKING:
    from training.config.keys import TrainConfig


class MayChange(NamedTuple):
    """The rule for changing a key between two starts.

    Attributes:
        free: whether it may have another value; else it is refused.
        effect: of a free key what another value changes, for the log; empty if that is nothing of what is trained.
            Of one that must agree what is compared instead of the value, if anything.
        but: what has to agree all the same.
        kept: whether `auto` keeps what the checkpoint has.
    """

    free: bool
    effect: str = ""
    but: str = ""
    kept: bool = False

    @property
    def counts(self) -> bool:
        """Say whether the value itself is compared."""
        return bool(self.effect) == self.free


FREE = MayChange(True)
NEXT = "counts from the next step on"
NEW_SCHEDULE = "the learning rate is that of the new schedule from the next step on"
ROUNDING = "sums are rounded in another order"
PRODUCTS = "the products of the blocks are rounded to other numbers"
MICRO_BATCHES = f"{ROUNDING}; a router loss is that of other micro-batches"

_RULES: list[tuple[MayChange, str]] = [
    (MayChange(False, "its config.json and tokenizer; the weights are those of the checkpoint"), "model_path"),
    (MayChange(False, "the samples that come of it"), "data_path prompt_format"),
    (MayChange(False, "the samples that come of it"), "template_args template_fallback mask truncate on_bad_record"),
    (MayChange(False, "the samples, and the rows of packed epochs, that come of it"), "max_seq_len"),
    (MayChange(False, "the samples that are left to train on"), "eval_share"),
    (MayChange(False), "train_batch_size dataloader_drop_last seed lora freeze"),
    # Of the parameters of an optimizer, all but these four may decide which states there are.
    (MayChange(False), "optimizer.type optimizer.no_wd_kws optimizer.params bf16 fp16 data_types"),
    (MayChange(True, NEXT), " ".join(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay"))),
    (MayChange(True, NEXT), "gradient_clipping aux_max_z_loss aux_router_loss"),
    (MayChange(True, NEW_SCHEDULE), "scheduler n_epoches max_steps"),
    (MayChange(True, MICRO_BATCHES, kept=True), "train_micro_batch_size_per_gpu"),
    (MayChange(True, MICRO_BATCHES, but="`dataset` stays `dataset`, in rows of the same length"), "packing pack_len"),
    (MayChange(True, f"{ROUNDING}, and dropout draws other numbers"), "model_topo schedule"),
    (MayChange(True, ROUNDING), "zero_optimization zero_force_ds_cpu_optimizer use_flash_attn compile"),
    (MayChange(True, ROUNDING), "communication_data_type deterministic tf32"),
    (MayChange(True, PRODUCTS), "fp8"),
    (MayChange(True, "where the records differ, the best checkpoint is looked for anew"), "eval_data_path"),
    (
        MayChange(True),
        "save_path storage from_scratch cache_dir resume save_interval save_minutes keep_last on_save_error",
    ),
    (MayChange(True), "save_async lora.start_from deepspeed_config"),
    (MayChange(True), "export_hf timeout_minutes max_bad_steps eval_interval eval_at_start"),
    (MayChange(True), "trackers tensorboard"),
    (MayChange(True), "steps_per_print use_grad_ckpt offload_activations offload_gradients"),
    (
        MayChange(True),
        "zero_allow_untested_optimizer gradient_accumulation_steps preemption_signals ports max_restarts",
    ),
]
CHANGES: dict[str, MayChange] = {}
for _rule, _keys in _RULES:
    CHANGES |= dict.fromkeys(_keys.split(), _rule)


def rule_of(key: str, rules: Mapping[str, MayChange] = CHANGES) -> MayChange:
    """Find the rule of a key: its own, or that of the section around it."""
    while key and key not in rules:
        key = key.rpartition(".")[0]
    return rules.get(key, MayChange(free=False))  # a key of a later version


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Collect the values that a later start is compared with, by key."""
    values = dict(leaves(config.dump()))
    rules = {key: rule_of(key, config.rules) for key in values}
    return {key: value for key, value in values.items() if rules[key].counts or not rules[key].free}


def compare(
    then: Mapping[str, Any], now: Mapping[str, Any], where: object, rules: Mapping[str, MayChange] = CHANGES
) -> list[str]:
    """Describe the changed settings, a line for each effect.

    Args:
        where: the checkpoint, for the message.
        rules: `config.rules` of the start.

    Raises:
        ConfigError: a setting differs that must agree.
    """
    by_effect: dict[str, list[str]] = defaultdict(list)
    of = {key: rule_of(key, rules) for key in {**now, **then}}
    keys = [key for key, rule in of.items() if rule.counts and then.get(key) != now.get(key)]
    changed = [key for key in keys if not (of[key].kept and now.get(key) == "auto")]
    fixed = [key for key in changed if not of[key].free]

    # In the config's order, which has the kind before its numbers; what an earlier version did not know is empty.
    for key in (key for key in fixed if then.get(key) or now.get(key)):
        section = key.partition(".")[0]
        before, after = _below(section, then), _below(section, now)
        if section != key and None in (before, after):
            raise differs(section, after, before, where)
        raise differs(key, now.get(key), then.get(key), where)

    for key in sorted(set(changed).difference(fixed)):
        by_effect[of[key].effect].append(f"{key} {_shown(then.get(key))} -> {_shown(now.get(key))}")
    return [f"changed since the checkpoint: {', '.join(keys)}: {effect}" for effect, keys in by_effect.items()]


def differs(key: str, now: object, then: object, where: object) -> ConfigError:
    """Make the refusal of another value."""
    expected = f"expected {_shown(then)}, or another save_path"
    return ConfigError(f"{key}: {_shown(now)}, but {where} was trained with {_shown(then)}; {expected}")


def _below(section: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Collect what a section has, by the rest of the keys; None without it."""
    size = len(f"{section}.")
    return {key[size:]: value for key, value in values.items() if key.startswith(f"{section}.")} or None


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
