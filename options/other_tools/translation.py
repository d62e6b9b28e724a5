"""Translate a config: walk the keys of ours that another tool's may have a value for.

What the tools call them stands in `training.config.foreign_names`, which errors and the docs have as well, what they
train without a key in tools.yml, and what only one of them has in `tools`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import chain
from typing import Any

from options.other_tools.draft import Draft
from options.other_tools.entries import ENTRIES, described
from options.other_tools.reading import HF, TOOLS, Theirs, as_list, is_true
from options.other_tools.tools import PREPARE
from training.config.foreign_names import VALUES
from training.errors import ConfigError

OPTIMIZERS, SCHEDULES = VALUES["optimizer.type"], VALUES["scheduler.type"]
TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow")
MASKS = {"train_on_inputs": "all", "train_on_prompt": "all", "mask_history": "last_turn"}
PAIRS, MARKED = ("beta", "sft_weight"), ("beta", "desirable_weight", "undesirable_weight")
PARAMETERS = {  # of the section `preference`, by loss; of the others `PAIRS`
    "cdpo": (*PAIRS, "label_smoothing"),
    "simpo": (*PAIRS, "gamma"),
    "kto": MARKED,
    "apo_zero_unpaired": MARKED,
    "reward": ("center_weight",),
}
ADAPTERS = ("finetuning_type", "adapter", "tuner_type", "train_type", "sft_type", "use_peft")
ADAPTS = {"lora": True, "qlora": True, "true": True, "full": False, "none": False, "false": False}
UNLIKE = """use_dora peft_use_dora pissa_init use_galore use_apollo use_badam use_llama_pro loftq_config
    relora""".split()  # other ways of adapting, which would train something else
REFUSED = "refused"  # a loss that is not there
OLDER = {"eval": ("evaluation_strategy",)}
ENDS = ("min_lr", "min_lr_rate")
JINJA = (".jinja", ".j2")
OFF = ("none", "false", "no", "0")
REQUIRED = {"model_path": "../llm/MODEL", "data_path": "data/records.json", "save_path": "runs/new"}
Rule = Callable[[Draft, str], None]


def translate(theirs: Theirs) -> Draft:
    """Translate a config.

    Raises:
        ConfigError: it asks for what is not trained here, or has a value that cannot be read.
    """
    declared = TOOLS[theirs.tool]
    draft = Draft(theirs, TOOLS[HF]["usual"] | declared["usual"])
    try:
        PREPARE[theirs.tool](draft)
        draft.usual |= declared.get("usual_of", {}).get(draft.method, {})
        for key in KEYS:
            RULES.get(key, Draft.move)(draft, key)
    except ConfigError:  # a ValueError, too
        raise
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ConfigError(f"a value of another kind than {theirs.tool}'s: {error}") from None
    draft.lose([*draft.left])
    for key, value in REQUIRED.items():
        if key not in draft.ours:
            draft.put(key, value, "missing there: write yours")
    draft.put("model_topo.process_topology.dims", [theirs.devices, 1], "[stages, replicas]")
    return draft


def _moved(by: Callable[[Any], Any]) -> Rule:
    return lambda draft, key: draft.move(key, by)


def _data(draft: Draft, key: str) -> None:
    given, note = draft.find(key)
    if given:
        entry = ENTRIES.get(draft.theirs.tool, described)
        name = note if isinstance(given, str) else note.partition(":")[0]
        draft.put(key, [entry(draft, each) for each in as_list(given)], name)


def _eval_share(draft: Draft, key: str) -> None:
    draft.take("dataset_dir")  # both kinds of data have been looked up in it
    given, note = draft.find(key)
    share = float(given or 0) / (100 if note.startswith("validation_split_percentage") else 1)
    if 0 < share < 1:
        draft.put(key, share, note)
    elif share:
        draft.lost[note] = "eval_share is a share of the records, not their number"


def _mask(draft: Draft, key: str) -> None:
    for name, mask in MASKS.items():
        if is_true(draft.take(name)) and key not in draft.ours:
            draft.put(key, mask, f"{name}: true")


def _prompt_format(draft: Draft, key: str) -> None:
    if str(draft.left.get("chat_template_jinja")).endswith(JINJA):
        draft.left[draft.names(key)[0]] = draft.take("chat_template_jinja")
    name, note = draft.find(key)
    if str(name).endswith(JINJA):
        draft.put(key, name, note)
    elif name not in (None, "tokenizer_default"):
        draft.lost[note] = "the tokenizer's own chat template is taken; --inspect 2 shows it"


def _preference(draft: Draft, key: str) -> None:
    losses = TOOLS[draft.theirs.tool]["losses"]
    if draft.method not in losses:
        raise draft.refuse(draft.theirs.tool, draft.method, losses)
    known = losses[draft.method]
    word, name, note = next(iter(known)), draft.names(key)[-1], draft.method
    if len(known) > 1:
        word = as_list(draft.take(name, otherwise=word))[0]
        note = f"{draft.method}, {name}: {word}"
    if (loss := known.get(word, REFUSED)) == REFUSED:
        raise draft.refuse(name, word, [each for each in known if known[each] != REFUSED])

    kept: tuple[str, ...] = ()
    if loss:
        smoothing = draft.left.get(draft.names("preference.label_smoothing")[0])
        loss = "cdpo" if smoothing and loss == "dpo" else loss
        kept = PARAMETERS.get(loss, PAIRS)
        draft.put(key, loss, note)
        draft.ours.pop("mask", None)  # prompts never count there
    draft.leave_out("preference", kept, f"without effect on {draft.method}")


def _lora(draft: Draft, section: str) -> None:
    for name in UNLIKE:
        if str(value := draft.take(name)).lower() not in OFF:
            raise draft.refuse(name, value, ["LoRA", "all weights"])
    name = next((name for name in ADAPTERS if name in draft.left), section)
    kind = str(draft.take(name, otherwise=draft.usual.get(section, "full"))).lower()
    if kind not in ADAPTS:
        raise draft.refuse(name, kind, ["lora", "full"])
    if not ADAPTS[kind]:
        draft.usual |= TOOLS[draft.theirs.tool].get("usual_of", {}).get("full", {})
        draft.leave_out(section, (), "without effect, as all weights are trained")
        return

    four, eight = (is_true(draft.take(f"load_in_{bits}bit")) for bits in (4, 8))
    bits = 8 if eight else 16
    bits = int(draft.take("quantization_bit", "quant_bits", otherwise=4 if four or kind == "qlora" else bits))
    if bits == 4:
        draft.put("lora.base", "nf4", "4 bits")
    elif bits < 16:
        draft.lost[f"base in {bits} bits"] = "held in 16 bits; lora.base: nf4 holds it in 4"


def _targets(value: Any) -> Any:
    names = as_list(value)
    return "all-linear" if names in (["all"], ["all-linear"], ["all_linear"]) else names


def _batches(draft: Draft, key: str) -> None:
    devices, rows = draft.theirs.devices, int(draft.find("train_micro_batch_size_per_gpu")[0])
    accumulated = draft.find("gradient_accumulation_steps")[0]
    if accumulated == "auto":  # ms-swift: as many as make a batch of 16
        accumulated = max(1, math.ceil(16 / (rows * devices)))
    note = f"{rows} a device x {accumulated} accumulated x {devices} device{'s' if devices > 1 else ''}"
    draft.put(key, rows * int(accumulated) * devices, note)
    draft.put("train_micro_batch_size_per_gpu", "auto", "chosen by the planner; it changes the speed alone")


def _epochs(draft: Draft, key: str) -> None:
    epochs, note = draft.find(key)
    whole = max(1, math.ceil(float(epochs)))
    draft.put(key, whole, note)
    if float(epochs) != int(float(epochs)) and "max_steps" not in draft.ours:
        draft.lost[note] = f"passes are whole here: {whole}; or set max_steps"


def _optimizer(draft: Draft, key: str) -> None:
    name, note = draft.find(key)
    rule = OPTIMIZERS.get(name)
    if rule in (None, "Adafactor"):  # which needs fp32 and other rates
        draft.lost[note] = "AdamW is taken; another learning rate may be right for it"
        rule = "AdamW"
    elif "8bit" in name:
        draft.differs.append(f"optim: {name}: the optimizer's states have 32 bits here")
    draft.put(key, rule, note)

    betas = [float(draft.take(name, otherwise=draft.usual[name])) for name in ("adam_beta1", "adam_beta2")]
    if rule != "SGD":
        draft.put("optimizer.params.betas", betas, "adam_beta1, adam_beta2")
    epsilon, note = draft.find("optimizer.params.eps")
    if rule == "AdamW":
        draft.put("optimizer.params.eps", float(epsilon), note)
    draft.put("optimizer.no_wd_kws", ["norm", "bias$"], "as transformers' Trainer leaves norms and biases out")


def _scheduler(draft: Draft, key: str) -> None:
    name, note = draft.find(key)
    kind, params = SCHEDULES.get(str(name), "linear"), "scheduler.params"
    draft.put(key, kind, note)
    if str(name) not in SCHEDULES:
        draft.lost[note] = "linear is taken; WarmupCosineLR, constant and WSD are there too"

    (steps, note), (share, of_share) = draft.find(f"{params}.warmup_num_steps"), draft.find(f"{params}.warmup_ratio")
    if 0 < float(steps or 0) < 1:  # transformers 5 reads it as a share
        steps, share, of_share = 0, steps, note
    if float(steps or 0):
        draft.put(f"{params}.warmup_num_steps", int(float(steps)), note)
    elif float(share or 0):
        draft.put(f"{params}.warmup_ratio", float(share), of_share)
    draft.put(f"{params}.warmup_type", "linear", "warm-ups of transformers are straight lines")

    more = draft.take("lr_scheduler_kwargs", otherwise={})
    more = json.loads(more) if isinstance(more, str) else more
    rate, least = float(draft.ours["optimizer.params.lr"]), draft.take("cosine_min_lr_ratio", otherwise=0.0)
    least = more.get("min_lr_rate", more.get("min_lr", least * rate) / rate if rate else 0.0)
    draft.lost |= {f"lr_scheduler_kwargs.{name}": "is not there" for name in more if name not in ENDS}
    if kind != "constant":
        end = "cos_min_ratio" if kind == "WarmupCosineLR" else "min_ratio"
        draft.put(f"{params}.{end}", float(least), "where transformers' schedule ends")
    draft.differs.append("a step has the rate that transformers' next one has: none has a rate of 0")


def _precision(draft: Draft, key: str) -> None:
    half = is_true(draft.take("fp16"))
    brain = is_true(draft.take("bf16", "pure_bf16", otherwise=draft.usual["bf16"] and not half))
    if half or brain:
        name = "fp16" if half else "bf16"
        draft.put(f"{name}.enabled", True, f"{name}: true")
    draft.lose(draft.left.keys() & {"tf32"}, "16-bit products do not use it")
    _, note = draft.find(key)
    draft.put(key, "auto", f"{note}; as many blocks as memory asks for")


def _interval(draft: Draft, key: str) -> None:
    """Take how often is saved or evaluated."""
    kind = key.partition("_")[0]
    how = draft.take(f"{kind}_strategy", *OLDER.get(kind, ()), otherwise="steps")
    number = float(draft.take(f"{kind}_steps", otherwise=0))
    if number and kind == "eval" and not draft.ours.keys() & {"eval_data_path", "eval_share"}:
        draft.lost[f"eval_steps: {number:g}"] = "there are no records to evaluate on"
    elif how == "steps" and number >= 1:
        draft.put(key, int(number), f"{kind}_steps: {number:g}")
    elif number and how == "steps":
        draft.lost[f"{kind}_steps: {number:g}"] = f"{key} counts steps, not a share of them"
    elif how == "epoch" and kind == "save":
        draft.lost["save_strategy: epoch"] = "saved at the end; save_interval: N or save_minutes: M saves between"


def _trackers(draft: Draft, key: str) -> None:
    names, project = draft.take("report_to"), draft.left.get("wandb_project")
    swanlab = is_true(draft.take("use_swanlab"))
    if names is not None or swanlab or project:
        names = as_list("wandb" if names is None and project else names or [])
        names += ["swanlab"] if swanlab else []
        kept = [name for name in names if name in TRACKERS]
        draft.put(key, ["tensorboard"] if names == ["all"] else kept, f"report_to: {', '.join(map(str, names))}")
    run, note = draft.find("wandb.name")
    for tracker in draft.ours.get(key, []):
        if run and tracker != "tensorboard":
            draft.put(f"{tracker}.name", str(run), note)


def _deepspeed(draft: Draft, key: str) -> None:
    """Take the offloading of a DeepSpeed file; the pipeline divides the layers, so its stage is not needed."""
    name, note = draft.find(key)
    if name is None:
        return
    try:
        zero = json.loads((draft.theirs.folder / str(name)).read_text(encoding="utf-8")).get("zero_optimization", {})
    except (OSError, ValueError, AttributeError):
        zero = {}
    if (zero.get("offload_optimizer") or {}).get("device") == "cpu":
        draft.put("zero_optimization.offload_optimizer.device", "cpu", note)
    draft.lost[note] = "the pipeline divides the layers instead; train_ds_zero.py has ZeRO's stages 2 and 3"


KEYS = f"""model_path save_path data_path eval_data_path eval_share max_seq_len packing mask prompt_format
    preference.loss {" ".join(f"preference.{name}" for name in dict.fromkeys(chain(PAIRS, *PARAMETERS.values())))}
    lora lora.r lora.alpha lora.dropout lora.targets lora.modules_to_save lora.rslora lora.lr_ratio lora.start_from
    train_batch_size max_steps n_epoches optimizer.type optimizer.params.lr optimizer.params.weight_decay
    scheduler.type gradient_clipping seed use_grad_ckpt steps_per_print keep_last save_interval eval_interval resume
    trackers wandb.project swanlab.project deepspeed_config""".split()  # in the order of the new file
RULES: dict[str, Rule] = {  # of keys that do not take a value of theirs as it is
    "data_path": _data,
    "eval_data_path": _data,
    "eval_share": _eval_share,
    "packing": _moved(lambda packed: "dataset" if is_true(packed) else "batch"),
    "mask": _mask,
    "prompt_format": _prompt_format,
    "preference.loss": _preference,
    "lora": _lora,
    "lora.targets": _moved(_targets),
    "lora.modules_to_save": _moved(as_list),
    "lora.rslora": _moved(is_true),
    "lora.start_from": _moved(lambda names: as_list(names)[0]),
    "train_batch_size": _batches,
    "max_steps": _moved(lambda steps: int(steps) if int(steps) > 0 else None),
    "n_epoches": _epochs,
    "optimizer.type": _optimizer,
    "scheduler.type": _scheduler,
    "use_grad_ckpt": _precision,
    "steps_per_print": _moved(lambda steps: max(1, int(steps))),
    "keep_last": _moved(lambda most: max(1, int(most))),
    "save_interval": _interval,
    "eval_interval": _interval,
    "resume": _moved(lambda value: value if isinstance(value, str) else "auto"),
    "trackers": _trackers,
    "deepspeed_config": _deepspeed,
}
