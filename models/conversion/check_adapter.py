"""Check an adapter's folder: whether it is whole and fits its base, and which programs read it.

What is said of vLLM, SGLang and llama.cpp is what their code did in autumn 2026; none of them says so by itself: SGLang
and llama.cpp scale by alpha / r whatever adapter_config.json says, and adapters of fused experts are lost where a
program looks for one of each expert.
"""

from __future__ import annotations

from pathlib import Path

from models.api import open_model
from models.checkpoint.adapter import adapted_paths, base_folder, is_peft
from models.errors import CheckpointError
from models.spec import ModelSpec

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
    what = f"adapts {len(layers)} linear layers and {len(experts)} weights of experts of {base_folder(folder)}"
    return [], [what, *readers(spec)]


def readers(spec: ModelSpec) -> list[str]:
    """Say for each program whether it reads a model's adapters, and what else to do."""
    lora, (layers, experts) = spec.trained.lora, adapted_paths(spec)
    assert lora is not None
    obstacles: dict[str, list[str]] = {"peft and transformers": [], "vLLM": [], "SGLang": [], "llama.cpp": []}
    if experts:
        obstacles["vLLM"].append("reads experts only of families whose weights it holds in one tensor, as gpt-oss")
        for name in ("SGLang", "llama.cpp"):
            obstacles[name].append("looks for an adapter of each expert by itself")
        if any(path.endswith("gate_proj") for path in layers):
            obstacles["peft and transformers"].append("peft 0.21 takes a dense gate_proj for that of the experts")
    for name in ("vLLM", "SGLang", "llama.cpp"):
        if lora.modules_to_save:
            obstacles[name].append("knows no modules_to_save")
    for name in ("SGLang", "llama.cpp"):
        if lora.rslora:
            obstacles[name].append("scales by alpha / r, not by alpha / sqrt(r)")
    lines = [f"{name}: {'; '.join(reasons) or 'yes'}" for name, reasons in obstacles.items()]
    return [*lines, MERGE] if any(obstacles.values()) else lines
