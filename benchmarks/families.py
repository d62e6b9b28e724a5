"""Which decoders of the installed transformers can be trained: each derived and held against transformers, small.

`python -m benchmarks.families` proves them one after the other and prints what came out; `--write` puts that into the
table in docs/models.md, which tells for each architecture with which releases of transformers it holds, and what with
the one that was asked last. Architectures are taken with the defaults of their config class, with one kind of block
each. Where a file declares a family, that declaration is held against transformers.

Takes two or three minutes on two cores.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
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
from models.spec import ModelSpec
from models.tensor_parallel import obstacle

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- proven: begin -->\n", "<!-- proven: end -->\n"
TOO_LARGE = ("phi4_multimodal",)  # whose parts for images and sound are made in full: a minute, to be refused
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# What the config of a `model_type` has to say besides its defaults, which are no sound model of some.
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
HEADER = (
    "| `model_type` | how | attention | packed documents | loss of the router | generation | shared rows | tensor plan "
    "| largest difference | transformers |\n|---|---|---|---|---|---|---|---|---|---|\n"
)
RELEASE = transformers.__version__.rpartition(".")[0]
REFUSED = "refused: "


class Verdict(NamedTuple):
    """What came out for a `model_type`: what holds, or why it is refused.

    Attributes:
        divided: whether several processes can share its layers.
    """

    model_type: str
    proof: Proof | None
    reason: str = ""
    divided: bool = False

    def row(self, releases: Iterable[str] = ()) -> str:
        """A line of the table.

        Args:
            releases: others of transformers with which it holds.
        """
        if self.proof is None:
            return f"| `{self.model_type}` | {REFUSED}{self.reason} | | | | | | | | {RELEASE} |\n"
        how = "declared" if self.model_type in FAMILIES else "derived"
        attention = "the layer's own" if self.proof.attention[0] == EAGER else "every kernel"
        packed = "one by one in linear attention" if self.proof.linear else "together"
        routed = "losses of the router" in self.proof.figures
        worst = max(self.proof.figures.values())
        cells = (
            how,
            attention,
            packed,
            "yes" if routed else "",
            "yes" if self.proof.generates else "no",
            "yes" if self.proof.shares_rows else "no",
            "yes" if self.divided else "no",
        )
        return (
            f"| `{self.model_type}` | {' | '.join(cells)} | {worst:.0e} | {', '.join(sorted({*releases, RELEASE}))} |\n"
        )


def config_of(model_type: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """A config at the size that its models have, and its config.json."""
    config = CONFIG_MAPPING[model_type](**DEFAULTS.get(model_type, {}) | changes)
    return config, {name: value for name, value in config.to_dict().items() if value is not None}


def candidates() -> list[str]:
    """The causal models of the installed transformers that declare a pipeline plan, and those that a file declares."""
    named = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return [name for name in named if name in FAMILIES or getattr(CONFIG_MAPPING[name], "base_model_pp_plan", None)]


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


def summary(verdicts: list[Verdict]) -> str:
    """How many hold with the installed transformers."""
    held = sum(each.proof is not None for each in verdicts)
    versions = f"transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}"
    return f"With {versions}, {held} of the {len(verdicts)} architectures hold.\n"


def written(verdicts: list[Verdict], before: str) -> str:
    """The generated part of docs/models.md.

    Args:
        before: what stands there, of which the lines about other releases of transformers stay.
    """
    lines = before.splitlines(keepends=True)
    told = {line for line in lines if line.startswith("With") and f"transformers {RELEASE}." not in line}
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `") and line not in HEADER}
    for each in verdicts:
        row = rows.get(each.model_type, "")
        known = row.rstrip(" |\n").rpartition("| ")[2]
        others = set(filter(None, known.split(", "))) - {RELEASE} if REFUSED not in row else set()
        if each.proof:
            rows[each.model_type] = each.row(others)
        elif others:  # with which it holds
            rows[each.model_type] = row.replace(known, ", ".join(sorted(others)))
        elif REFUSED not in row or Version(known) <= Version(RELEASE):  # the newest one's reason is told
            rows[each.model_type] = each.row()
    table = sorted(rows.values(), key=lambda row: (REFUSED in row, row))
    return "".join(sorted(told | {summary(verdicts)})) + "\n" + HEADER + "".join(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold every decoder of transformers against its derived family.")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    console = Console(highlight=False)
    verdicts = []
    for model_type in candidates():
        verdicts.append(verdict(model_type))
        console.print(verdicts[-1].row().strip(), soft_wrap=True)
    console.print(summary(verdicts).strip())
    if options.write:
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
        known, _, after = rest.partition(END)
        DOCUMENT.write_text(before + BEGIN + written(verdicts, known) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
