"""Export the last weights of the small run as a user would, and read them back with transformers and peft."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
from transformers.utils import logging

from models.attention.positions import LINEAR
from models.conversion.check_adapter import dense_beside_experts
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.images.small import token_types
from models.spec import ModelSpec
from options.proof.comparison import Row, choose_bounds
from options.proof.reference import Reference
from options.proof.small_run import MODEL, SmallRun

ADAPTER = "adapter"


def plan_exports(spec: ModelSpec) -> tuple[dict[str, ExportOptions], list[str]]:
    """Choose the exports that are read back, by name, and say in a line which are not."""
    own_code, adapted = spec.family.translate is not None, spec.trained.lora is not None
    if (spec.is_part and not spec.family.sees) or (own_code and not spec.family.native):
        return {}, ["exports: not read back, as transformers has no class for the small model"]
    whole = ExportOptions("native" if own_code else "original", merge=adapted)
    if not adapted:
        return {"model": whole}, []
    if own_code or dense_beside_experts(spec) or importlib.util.find_spec("peft") is None:
        reason = "peft is not installed, or has no names for all of it (convert_model.py check)"
        return {"merged model": whole}, [f"exports: the adapter is not read back, as {reason}"]
    return {"merged model": whole, ADAPTER: ExportOptions()}, []


def compare_exports(small: SmallRun, checkpoint: Path) -> list[Row]:
    """Export a checkpoint in each way, and return a row of the logits of each, which fails if it cannot be read."""
    values = small.config.dump() | {"bf16": {}, "fp16": {}}
    if small.config.lora:
        values["lora"] |= {"start_from": str(checkpoint), "base": None}  # an export adds it to the base's own weights
    else:
        values["model_path"] = str(checkpoint)
    reference = Reference(type(small.config).model_validate(values), small.samples, small.evaluated)
    expected = list(reference.logits())
    bound = choose_bounds(torch.float32, small.spec.n_layers, LINEAR in small.spec.positions().kinds)[1]

    rows = []
    for name, options in plan_exports(small.spec)[0].items():
        rows.append(row := Row(f"logits of the exported {name}", bound))
        folder = small.folder / f"exported-{name}"
        try:
            pp_to_hg(checkpoint, folder, options=options)
            model = _load(small, folder, name)
            for number, (document, logits) in enumerate(expected, 1):
                ids, images = torch.tensor([document["input_ids"]]), reference.images(document)
                if small.spec.family.sees:
                    images |= token_types(model.get_base_model() if name == ADAPTER else model, ids)
                with torch.no_grad():
                    found = model(input_ids=ids, **images).logits[0]
                row.note(((found - logits).norm() / logits.norm()).item(), f"text {number}")
        except Exception as error:  # whatever the libraries raise
            reason = (str(error).strip().splitlines() or [""])[0]
            row.note(math.inf, f"{type(error).__name__}: {reason}")

    return rows


def _load(small: SmallRun, folder: Path, name: str) -> Any:
    """Load an export in fp32, an adapter on top of its exported base."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    whole, labels = folder, len(small.spec.labels)
    if name == ADAPTER:
        pp_to_hg(small.folder / MODEL, whole := folder.with_name("exported-base"))
    usual = AutoModelForImageTextToText if small.spec.family.sees else AutoModelForCausalLM
    kind = AutoModelForSequenceClassification if labels else usual
    options: dict[str, Any] = {"num_labels": labels} if labels else {}
    model = kind.from_pretrained(whole, dtype=torch.float32, attn_implementation="eager", **options)
    if name == ADAPTER:
        from peft import PeftModel  # which need not be installed

        model = PeftModel.from_pretrained(model, folder)
    model.config.pad_token_id = None  # or a score would be that of the last token which is not padding
    return model.eval()
