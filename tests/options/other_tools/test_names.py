"""One table names the keys of other tools: for errors, for `init --from` and for the docs, each with its reason."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from options import RunConfig
from options.other_tools import tools, translation
from options.other_tools.draft import NOT_HERE
from options.other_tools.reading import TOOLS, read_theirs
from options.other_tools.translation import translate
from options.preference.keys import PreferenceSection
from tests.conftest import ROOT
from tests.training.config.test_mistakes import keys_of
from training.config.foreign_names import FOREIGN, NAMES, OTHERS
from training.errors import ConfigError

STOCK = sorted((Path(__file__).parent / "stock").iterdir())
OURS = set(keys_of(RunConfig))
TRANSLATED = [name for name in TOOLS if "usual" in TOOLS[name]]
OF_ONE_TOOL = {"dtype", "torch_dtype", "dataset_dir"}  # which only `init --from` reads, or whose words are our keys


def taken() -> set[str]:
    """The names of theirs that the code takes by themselves, besides those that it finds by our key."""
    found: set[str] = set()
    for module in (tools, translation):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("take", "get")
            ):
                words = node.args if node.func.attr == "take" else node.args[:1]
                found |= {str(word.value) for word in words if isinstance(word, ast.Constant)}
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                found |= {str(node.slice.value)}
    return {name for name in found if re.fullmatch(r"[a-z]\w+", name)} - {"usual", "usual_of", "losses", "path"}


def test_each_name_that_is_taken_is_in_the_table() -> None:
    names = taken() | {*translation.MASKS, *translation.ADAPTERS, *translation.UNLIKE, *tools.PEFT.values()}
    assert len(names) > 50
    tables = OURS | OF_ONE_TOOL | {*VALUE_NAMES}
    assert sorted(name for name in names if name not in FOREIGN and name not in tables) == []


# Keys that are called the same here, words of values, and what an optional file says.
VALUE_NAMES = {
    "optimizer",
    "full",
    "min_lr",
    "min_lr_rate",
    "tf32",
    "device",
    "offload_optimizer",
    "zero_optimization",
    "gradient_accumulation_steps",
}


@pytest.mark.parametrize("tool", TRANSLATED)
def test_a_tool_is_declared_with_our_keys_and_losses(tool: str) -> None:
    declared = TOOLS[tool]
    usual = [declared["usual"], *declared.get("usual_of", {}).values()]
    assert {key for each in usual for key in each} <= OURS | {"adam_beta1", "adam_beta2"}
    losses = {loss for words in declared["losses"].values() for loss in words.values()}
    known = get_args(PreferenceSection.model_fields["loss"].annotation)
    assert losses <= {*known, None, translation.REFUSED}
    assert set(declared.get("usual_of", {})) <= {*declared["losses"], "full"}


def test_each_key_that_is_walked_is_ours_and_each_rule_walks() -> None:
    assert set(translation.KEYS) <= OURS
    assert translation.RULES.keys() <= set(translation.KEYS)
    assert {*translation.PARAMETERS} <= {*get_args(PreferenceSection.model_fields["loss"].annotation)}


@pytest.mark.parametrize("file", STOCK, ids=lambda file: file.stem)
def test_nothing_of_a_stock_file_is_lost_without_a_reason(file: Path) -> None:
    theirs = read_theirs(file)
    draft = translate(theirs._replace(devices=1))
    assert draft.left == {}
    assert [line for line, why in draft.lost.items() if not why or why == NOT_HERE] in ([], [MISSPELT])
    said = json.dumps([draft.notes, draft.lost, draft.differs])
    off = [name for name, value in theirs.values.items() if value in (False, None)]
    silent = [name for name in theirs.values if name not in said and name not in off]
    assert set(silent) <= IN_OTHER_WORDS


MISSPELT = "no_remove_unused_columns: True"  # the switch that turns remove_unused_columns off
# What stands in a note under another name, or has no effect in that tool either.
IN_OTHER_WORDS = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "micro_batch_size",
    "lora_target_linear",
    "optimizer",
    "eval_strategy",
    "finetuning_type",
    "stage",
    "adapter",
    "use_peft",
    "tuner_type",
    "train_type",
    "load_in_4bit",
    "load_in_8bit",
    "dataset_dir",
    "rl",
    "rlhf_type",
    "cosine_min_lr_ratio",
    "torch_dtype",
    "wandb_name",
    "dataset_train_split",
}


@pytest.mark.parametrize(
    ("tool", "values", "words"),
    [
        (
            "LLaMA-Factory",
            {"stage": "ppo"},
            "LLaMA-Factory: ppo: is not trained here; expected sft, pt, dpo, kto or rm",
        ),
        (
            "LLaMA-Factory",
            {"finetuning_type": "freeze"},
            "finetuning_type: freeze: is not trained here; expected lora ",
        ),
        ("LLaMA-Factory", {"use_galore": True}, "use_galore: True: is not trained here; expected LoRA or all weights"),
        (
            "LLaMA-Factory",
            {"stage": "dpo", "pref_loss": "hinge"},
            "pref_loss: hinge: is not trained here; expected sig",
        ),
        ("axolotl", {"rl": "grpo"}, "axolotl: grpo: is not trained here; expected sft, dpo, ipo, "),
        (
            "TRL",
            {"use_peft": True, "use_dora": True},
            "use_dora: True: is not trained here; expected LoRA or all weights",
        ),
        ("ms-swift", {"rlhf_type": "gkd"}, "ms-swift: gkd: is not trained here; expected sft, "),
        ("TRL", {"learning_rate": "fast", "lr_scheduler_type": "cosine"}, "a value of another kind than TRL's: could "),
    ],
)
def test_what_would_train_something_else_is_refused(tool: str, values: dict[str, Any], words: str) -> None:
    theirs = read_theirs(STOCK[0])._replace(tool=tool, values=values, method="", devices=1)
    with pytest.raises(ConfigError) as refused:
        translate(theirs)
    assert str(refused.value).startswith(words)


def test_what_tool_and_run_have_no_use_for_is_said(tmp_path: Path) -> None:
    values = {
        "base_model": "m",
        "chat_template_jinja": "{{ messages }}",
        "lr_scheduler": "cosine",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1, "num_cycles": 2},
        "dpo_beta": 0.3,
        "lora_r": 8,
        "tf32": True,
        "unheard_of": 1,
    }
    draft = translate(read_theirs(STOCK[0])._replace(tool="axolotl", values=values, method="", devices=1))
    assert draft.ours["scheduler.params.cos_min_ratio"] == 0.1
    assert draft.lost == {
        "lr_scheduler_kwargs.num_cycles": "is not there",
        "dpo_beta: 0.3": "without effect on sft",
        "lora_r: 8": "without effect, as all weights are trained",
        "tf32: True": "16-bit products do not use it",
        "chat_template_jinja: {{ messages }}": "the tokenizer has the chat template",
        "unheard_of: 1": NOT_HERE,
    }


@pytest.mark.parametrize("page", ["coming-from.md", "coming-from_CN.md"])
def test_the_page_has_each_name_in_its_tools_column(page: str) -> None:
    lines = [line.split(" | ") for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()]
    header = next(line for line in lines if "axolotl" in line)
    for tool in NAMES:
        column = header.index(tool)
        there = {name for line in lines if len(line) == len(header) for name in re.findall(r"`(\w+)`", line[column])}
        assert there == {name for names in NAMES[tool].values() for name in names}, tool


def test_the_table_names_nothing_twice() -> None:
    names = [name.partition(":")[0] for _, _, names in OTHERS for name in names.split()]
    assert len(names) == len(set(names)) == len(FOREIGN)
    assert yaml.safe_load((ROOT / "training/config/foreign_names.yml").read_text(encoding="utf-8"))["values"]
