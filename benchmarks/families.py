"""Derive every decoder of the installed transformers and compare it with transformers, small; two or three minutes.

`python -m benchmarks.families` prints what came out; `--write` puts it into docs/models.md, with the releases of
transformers that each architecture holds with. Architectures have the defaults of their config class and one block of
each kind. Families that a file declares are compared by their declaration.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from rich.console import Console
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models.architectures import FAMILIES
from models.attention.kernels import EAGER
from models.derived.derive import BLOCKS, derive
from models.derived.proof import Proof, prove
from models.derived.shrink import shrunk_fields
from models.parallel.tensor import obstacle
from models.spec import ModelSpec

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- proven: begin -->\n", "<!-- proven: end -->\n"
TOO_LARGE = ("phi4_multimodal",)  # its parts for images and sound would be built in full: a minute
# Without a pipeline plan: with learned positions, or with masks or angles that blocks compute for themselves.
UNPLANNED = ("biogpt", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "opt")
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Additions to the defaults of config classes that are no sound model.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "deepseek_v2": {
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
    },
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0},
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0},
    "minimax_m2": {"rotary_dim": 64},
    "minimax_m3_vl_text": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
}
VERSION = transformers.__version__
RELEASE = VERSION.rpartition(".")[0]
REFUSED, USUAL = "refused", "no limits"
HEADER = "| | `model_type` |\n|---|---|\n"


class Verdict(NamedTuple):
    """What holds for a `model_type`, or why it is refused.

    Attributes:
        divided: whether tensor parallelism is possible.
    """

    model_type: str
    proof: Proof | None
    reason: str = ""
    divided: bool = False

    @property
    def traits(self) -> str:
        """Say what is special, as the table does."""
        if self.proof is None:
            return REFUSED
        traits = {
            "router loss": "losses of the router" in self.proof.figures,
            "linear attention": self.proof.linear,
            "only the layer's own attention": self.proof.attention[0] == EAGER,
            "no generation": not self.proof.generates,
            "no sequence parallelism": not self.proof.shares_rows,
            "no rows in chunks": not self.proof.chunks_rows,
            "no tensor parallelism": not self.divided,
        }
        return "; ".join(name for name, holds in traits.items() if holds) or USUAL


def config_of(model_type: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Make a config of the published size, and its config.json."""
    config = CONFIG_MAPPING[model_type](**DEFAULTS.get(model_type, {}) | changes)
    return config, {name: value for name, value in config.to_dict().items() if value is not None}


def candidates() -> list[str]:
    """List the causal models that declare a pipeline plan, those that a file declares, and `UNPLANNED`."""
    named, known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), {*FAMILIES, *UNPLANNED}
    return [name for name in named if name in known or getattr(CONFIG_MAPPING[name], "base_model_pp_plan", None)]


def verdict(model_type: str) -> Verdict:
    """Prove one."""
    if model_type in TOO_LARGE:
        return Verdict(model_type, None, "it has parts for images and sound")
    try:
        family = FAMILIES.get(model_type)
        config, fields = config_of(model_type)
        proof = prove(config, fields, family)
        small = shrunk_fields(config, fields, BLOCKS)
        config = type(config).from_dict(small)
        spec = ModelSpec(family or derive(config, small), config, small, small)
        return Verdict(model_type, proof, divided=obstacle(spec, 2) is None)
    except Exception as error:  # whatever transformers makes of a small config
        return Verdict(model_type, None, " ".join(str(error).split()).partition(";")[0])


def read(text: str) -> tuple[dict[str, str], dict[str, tuple[str, set[str]]]]:
    """Read the generated part of docs/models.md.

    Returns:
        The line about each release of transformers; the traits of each architecture, and the releases that it holds
        with.
    """
    summaries = {
        found[1]: found[0] for found in re.finditer(r"^With transformers (\d+\.\d+)\..*\n", text, re.MULTILINE)
    }
    known = {}
    for traits, names in re.findall(r"^\| (.*) \| (`.*) \|$", text.partition(HEADER)[2], re.MULTILINE):
        for name, only in re.findall(r"`(\w+)`(?: \(([\d., ]+)\))?", names):
            everywhere = () if traits == REFUSED else summaries
            known[name] = traits, set(only.split(", ") if only else everywhere)
    return summaries, known


def written(verdicts: list[Verdict], before: str) -> str:
    """Make the generated part of docs/models.md; what `before` says of other releases stays."""
    summaries, known = read(before)
    held = sum(each.proof is not None for each in verdicts)
    versions = f"transformers {VERSION} and torch {torch.__version__.partition('+')[0]}"
    summaries[RELEASE] = f"With {versions}, {held} of the {len(verdicts)} architectures hold.\n"
    for each in verdicts:
        traits, releases = known.get(each.model_type, (REFUSED, set()))
        releases = releases - {RELEASE}
        if each.proof:
            known[each.model_type] = each.traits, releases | {RELEASE}
        elif not releases:
            known[each.model_type] = REFUSED, set()
        else:
            known[each.model_type] = traits, releases
    rows: dict[str, list[str]] = defaultdict(list)
    for name, (traits, releases) in sorted(known.items()):
        some = traits != REFUSED and releases != set(summaries)
        rows[traits].append(f"`{name}`" + (f" ({', '.join(sorted(releases, key=Version))})" if some else ""))
    order = sorted(rows, key=lambda traits: (traits == REFUSED, traits != USUAL, traits))
    table = "".join(f"| {traits} | {', '.join(rows[traits])} |\n" for traits in order)
    return "".join(summaries[each] for each in sorted(summaries, key=Version)) + "\n" + HEADER + table


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare every decoder of transformers with its derived family.")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    console = Console(highlight=False)
    verdicts = []
    for model_type in candidates():
        verdicts.append(verdict(model_type))
        name, proof, reason, _ = verdicts[-1]
        worst = f"largest difference {max(proof.figures.values()):.0e}" if proof else reason
        console.print(f"{name}: {verdicts[-1].traits}; {worst}", soft_wrap=True)
    if options.write:
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
        known, _, after = rest.partition(END)
        DOCUMENT.write_text(before + BEGIN + written(verdicts, known) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
