"""Check an adapter's folder: whether it is whole and fits its base, and which programs read it.

What is said of them is what their code did in autumn 2026; few of them say so by themselves:

- peft 0.21, `utils/transformers_weight_conversion.py`: in families whose experts were modules in transformers 4 it
  takes the targets `gate_proj`, `up_proj` and `down_proj` for weights of the experts, and linear layers of these names
  get no adapters.
- vLLM: `FusedMoE3DWithLoRA` reads `experts.lora_A` and `experts.base_layer.lora_A` for models whose class says
  `is_3d_moe_weight` (gpt-oss, Qwen3-VL-MoE, Qwen3.5-MoE), others only with `enable_mixed_moe_lora_format`.
  `vllm/lora/peft_helper.py` raises "vLLM only supports modules_to_save being None" and scales by alpha / sqrt(r);
  `MaxLoRARanks` of `vllm/config/lora.py` ends with 512, and `max_lora_rank` is 16 unless it is asked for more.
- SGLang, `srt/lora/lora.py`: `scaling = lora_alpha / r`; experts are `experts.0.gate_proj` or three-dimensional
  `experts.gate_up_proj`, which are not peft's names; of `modules_to_save` nothing is looked for.
- llama.cpp, `convert_lora_to_gguf.py`: writes `lora_alpha` alone, which is divided by the rank; `experts.lora_A` is
  taken for the weight `experts.weight`, which no model has; a tensor that is no factor ends it.
"""

from __future__ import annotations

from pathlib import Path

from models.api import open_model
from models.checkpoint.adapter import base_folder, is_peft
from models.checkpoint.adapter_settings import adapted_paths
from models.checkpoint.layout import ADAPTER, Layout, layout_of
from models.errors import CheckpointError
from models.spec import ModelSpec

VLLM_RANKS = 16, 32, 64, 128, 256, 320, 512
OF_EXPERTS = "gate_proj", "up_proj", "down_proj"
MERGE = "serve it merged: pp_to_hg --merge for a run's, merge_and_unload of peft for others"


def check_adapter(folder: Path) -> tuple[list[str], list[str]]:
    """List what keeps an adapter from being loaded, if anything, and what there is to know of it.

    Raises:
        CheckpointError: it is a run's.
    """
    if not is_peft(folder):
        raise CheckpointError(f"{folder}: an adapter of a run, which only Pipetune reads; export it with pp_to_hg")
    try:
        spec, states = open_model(folder)
        for layer in range(spec.n_layers):
            states.check_layer(layer)
    except CheckpointError as error:
        return [str(error)], []
    layers, experts = adapted_paths(spec)
    base = base_folder(folder)
    found = [f"adapts {len(layers)} linear layers and {len(experts)} weights of experts of {base}", *readers(spec)]
    if layout_of(base) is Layout.PIPELINE:
        what = f"expected a HuggingFace folder as base_model_name_or_path in {ADAPTER}"
        found.append(f"peft cannot load {base} itself, which is in the pipeline layout; {what}")
    return [], found


def readers(spec: ModelSpec) -> list[str]:
    """Say for each program whether it reads a model's adapters, and what else to do."""
    lora, (_, experts) = spec.trained.lora, adapted_paths(spec)
    assert lora is not None
    obstacles: dict[str, list[str]] = {"peft and transformers": [], "vLLM": [], "SGLang": [], "llama.cpp": []}

    if dense := dense_beside_experts(spec):
        what = f"peft 0.21 takes the dense {', '.join(dense)} for those of the experts and leaves them out"
        obstacles["peft and transformers"].append(what)
    if experts:
        obstacles["vLLM"].append("reads experts only of families whose weights it holds in one tensor, as gpt-oss")
    if lora.modules_to_save:
        obstacles["vLLM"].append("knows no modules_to_save up to summer 2026")

    lacks = {
        "looks for an adapter of each expert by itself": experts,
        "knows no modules_to_save": lora.modules_to_save,
        "scales by alpha / r, not by alpha / sqrt(r)": lora.rslora,
    }
    for name in ("SGLang", "llama.cpp"):
        obstacles[name] += [what for what, needed in lacks.items() if needed]

    enough = next((rank for rank in VLLM_RANKS if rank >= lora.r), None)
    if enough is None:
        obstacles["vLLM"].append(f"takes ranks up to {VLLM_RANKS[-1]}")
    yes = {"vLLM": f"yes, with --max-lora-rank {enough}"} if lora.r > VLLM_RANKS[0] else {}
    lines = [f"{name}: {'; '.join(reasons) or yes.get(name, 'yes')}" for name, reasons in obstacles.items()]
    return [*lines, MERGE] if any(obstacles.values()) else lines


def dense_beside_experts(spec: ModelSpec) -> list[str]:
    """List the names of adapted linear layers that peft looks for among the experts, and so leaves without adapters."""
    names = {path.rpartition(".")[2] for path in adapted_paths(spec)[0]} if spec.has_experts else set()
    return [name for name in OF_EXPERTS if name in names]
