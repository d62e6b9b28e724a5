"""Say which programs draft with a folder's layers that predict further ahead.

What is said of them is what their code did in autumn 2026:

- transformers 5.23: `GenerationConfig.use_mtp` makes them of a folder, for configs with `num_mtp_layers`; else their
  weights are left out (`_keys_to_ignore_on_load_unexpected`).
- vLLM, `hf_config_override` of `vllm/config/speculative.py`: finds them by `model_type` or architecture, and their
  number by `num_nextn_predict_layers` or, of Qwen3.5, `mtp_num_hidden_layers`.
- SGLang, `_config_draft_model` of `srt/configs/model_config.py`: finds them by architecture.
"""

from __future__ import annotations

from pathlib import Path

from models.ahead.layers import Ahead
from models.ahead.model import stored_ahead
from models.ahead.names import APART, BEHIND_THE_BLOCKS, BY_PART
from models.api import read_spec
from models.spec import ModelSpec

# By the names that their layers have; new layers (`mtp.init`) may have others than servers look for.
SERVED = {
    BEHIND_THE_BLOCKS: {"deepseek_v3", "glm4_moe", "glm4_moe_lite"},
    APART: {"qwen3_next", "qwen3_5", "qwen3_5_moe"},
    BY_PART: {"ernie4_5_moe"},
}
SERVED_BY_VLLM = {APART: {"qwen3_5_text", "qwen3_5_moe_text"}}


def readers_of_ahead(folder: Path) -> list[str]:
    """List who drafts with the layers ahead of a HuggingFace folder that is whole; nothing where it has none."""
    spec = read_spec(folder)
    found = stored_ahead(folder, spec)
    if found is None:
        return []
    return [f"layers that predict further ahead, for drafts: {found.depth}", *_readers(spec, found)]


def _readers(spec: ModelSpec, found: Ahead) -> list[str]:
    kind, served = str(spec.raw["model_type"]), SERVED[found.naming]
    unknown = f"looks for none under these names in a model of type {kind}"
    vllm = sglang = unknown
    if kind in served:
        sglang = "yes, with --speculative-algorithm EAGLE"
    if kind in served | SERVED_BY_VLLM.get(found.naming, set()):
        tokens = f'{{"method": "mtp", "num_speculative_tokens": {found.depth}}}'
        vllm = f"yes, with --speculative-config '{tokens}'"

    asked = hasattr(spec.config, "num_mtp_layers")
    transformers = "yes, by generate(..., use_mtp=True)" if asked else "leaves them out"
    return [f"transformers: {transformers}", f"vLLM: {vllm}", f"SGLang: {sglang}"]
