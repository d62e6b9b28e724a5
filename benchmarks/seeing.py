"""Ask of every model of images and text of the installed transformers whether its images are seen, and why not.

`python -m benchmarks.seeing` prints what came out; `--write` puts it into docs/images.md and docs/images_CN.md. Each
has the defaults of its config class, small, and is compared with transformers' whole model; three minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from rich.console import Console
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

from data.images.processor import says_what_stands
from models.api import read_spec
from models.errors import CheckpointError
from models.images import seeing

DOCUMENTS = [Path(__file__).parent.parent / "docs" / name for name in ("images.md", "images_CN.md")]
BEGIN, END = "<!-- kinds: begin -->\n", "<!-- kinds: end -->\n"
LONGEST = 160  # characters of a reason
SEEN, REFUSED = "| seen | `model_type` |\n|---|---|\n", "| refused | what is missing |\n|---|---|\n"
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def _axes(*sections: int, partial_rotary_factor: float = 1.0, **text: int) -> dict[str, Any]:
    rope = ROPE | {"mrope_section": list(sections), "partial_rotary_factor": partial_rotary_factor}
    return {"text_config": {"rope_parameters": rope, **text}}


# Additions to the defaults of config classes, as published models have them.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}},
    "ernie4_5_vl_moe": _axes(22, 22, 20),
    "gemma4": {
        "text_config": {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
        "vision_config": {},
    },
    "gemma4_unified": {"text_config": {"hidden_size_per_layer_input": 0}, "vision_config": {}},
    "glm4v": _axes(8, 12, 12, partial_rotary_factor=0.5),
    "glm4v_moe": _axes(8, 12, 12, head_dim=128, partial_rotary_factor=0.5),
    "glm46v": _axes(8, 12, 12, partial_rotary_factor=0.5),
    "glmga": _axes(8, 12, 12, partial_rotary_factor=0.5),
    "glm_ocr": _axes(16, 24, 24, head_dim=128),
    "minimax_m3_vl": {"text_config": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}},
    "paddleocr_vl": _axes(16, 24, 24),
    "qwen2_5_vl": _axes(16, 24, 24),
    "qwen2_vl": _axes(16, 24, 24),
}


class SeenKind(NamedTuple):
    """What a kind of model does with images, or why none are taken of it."""

    model_type: str
    traits: str = ""
    reason: str = ""


def config_of(model_type: str) -> dict[str, Any]:
    """Make the config.json of a whole model."""
    config = CONFIG_MAPPING[model_type](**DEFAULTS.get(model_type, {}))
    fields: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return fields


def read(document: Path) -> str:
    """Take the generated part of a document."""
    return document.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def candidates() -> list[str]:
    """List transformers' models of images and text."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def verdict(model_type: str) -> SeenKind:
    """Prove one."""
    try:
        sees = seeing(read_spec(Path(), config_of(model_type))).family.sees
    except CheckpointError as error:
        return SeenKind(model_type, reason=_reason(str(error), model_type))
    assert sees is not None
    traits = {
        "positions along three axes": sees.axes,
        f"both ways within an image ({', '.join(sees.both_ways)})": sees.both_ways,
        "features behind the first blocks too": sees.deep,
        "its image processor needs torchvision, so records are refused": not has_processor(model_type),
        "its processor does not say what stands for an image, so records are refused": not says_places(model_type),
    }
    return SeenKind(
        model_type, "; ".join([f"`{'`, `'.join(sees.inputs)}`", *(name for name in traits if traits[name])])
    )


def has_processor(model_type: str) -> bool:
    """Return whether transformers has an image processor of this kind that needs Pillow alone."""
    return "pil" in IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type, {"pil": ""})  # some are named in checkpoints alone


def says_places(model_type: str) -> bool:
    """Return whether transformers' processor of this kind says what it writes for an image."""
    name = PROCESSOR_MAPPING_NAMES.get(model_type)
    return name is None or says_what_stands(processor_class_from_name(name))  # some are named in checkpoints alone


def _reason(line: str, model_type: str) -> str:
    """Say what is missing, in the words of the refusal, without what is particular to the model."""
    line = re.sub(rf"^config\.json: |^{re.escape(model_type)}( with images)?: ", "", line).partition("; expected")[0]
    line = line.replace("|", "/").replace("`", "'").partition(", and Pipetune declares")[0]
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


def table(kinds: Iterable[SeenKind]) -> str:
    """Make the generated part of the document."""
    seen, refused = defaultdict[str, list[str]](list), list[str]()
    for each in kinds:
        if each.reason:
            refused.append(f"| `{each.model_type}` | {each.reason} |\n")
        else:
            seen[each.traits].append(f"`{each.model_type}`")
    rows = [f"| {traits} | {', '.join(names)} |\n" for traits, names in sorted(seen.items())]
    return f"\n{SEEN}{''.join(rows)}\n{REFUSED}{''.join(refused)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask every model of images and text whether its images are seen.")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/images.md and docs/images_CN.md")
    parser.add_argument("kinds", nargs="*", help="only these")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    console, kinds = Console(highlight=False), list[SeenKind]()
    for model_type in options.kinds or candidates():
        kinds.append(verdict(model_type))
        console.print(f"{model_type}: {kinds[-1].traits or kinds[-1].reason}", soft_wrap=True)
    for document in DOCUMENTS if options.write else ():
        before, _, rest = document.read_text(encoding="utf-8").partition(BEGIN)
        document.write_text(before + BEGIN + table(kinds) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
