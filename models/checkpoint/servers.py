"""What each program that serves models still misses in a HuggingFace folder.

Nothing is loaded: names and shapes of the weights are compared with config.json by the files' headers, and settings are
read as files. Which architectures a server takes is known of vLLM 0.32.0 and SGLang 0.5.23; docs/serving.md says what
was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from models.checkpoint.compat import older_fields, older_tokenizer
from models.checkpoint.layout import Layout, layout_of, resolve
from models.checkpoint.source import HuggingFaceSource
from models.config_json import read_json
from models.errors import CheckpointError
from models.spec import ModelSpec

# Whether it stands on transformers 4.
SERVERS = {
    "transformers 5": False,
    "transformers 4": True,
    "vLLM from 0.19.1": False,
    "vLLM before": True,
    "SGLang from 0.5.10": False,
    "SGLang before": True,
    "text-generation-inference": True,
    "llama.cpp (convert_hf_to_gguf)": False,
}
TIED = "vLLM 0.32.0 takes it with a tied head alone"
# By server and family, which models of it are refused and why.
REFUSALS: dict[tuple[str, str], tuple[Callable[[ModelSpec], bool], str]] = {
    ("SGLang from 0.5.10", "bloom"): (lambda spec: True, "SGLang 0.5.23 has no class for it"),
    ("vLLM from 0.19.1", "bloom"): (lambda spec: not spec.tied, TIED),
    ("vLLM from 0.19.1", "gemma2"): (lambda spec: not spec.tied, TIED),
    ("vLLM from 0.19.1", "qwen2"): (
        lambda spec: len(set(spec.config.layer_types)) > 1,
        "vLLM 0.32.0 takes sliding windows in all blocks or in none",
    ),
}


def check(input_path: str | Path) -> dict[str, list[str]]:
    """By server, what a folder lacks; nothing where it is complete.

    Raises:
        CheckpointError: it is no HuggingFace folder, or its config.json or its tokenizer's settings cannot be read.
    """
    folder = resolve(input_path)
    if layout_of(folder) is not Layout.HUGGINGFACE:
        raise CheckpointError(f"{folder}: in the pipeline layout, which no server reads; export it with pp_to_hg")
    spec = ModelSpec.from_folder(folder)
    path, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings = read_json(path) if path.is_file() else {}
    general = []
    try:
        source = HuggingFaceSource(folder, spec)
        for layer in range(spec.n_layers):
            source.check_layer(layer)
    except CheckpointError as error:
        general.append(str(error))
    if code := foreign_code(spec):
        general.append(code)
    if not (folder / "tokenizer.json").is_file():
        general.append("no tokenizer.json")
    if not template.is_file() and "chat_template" not in settings:
        general.append("no chat template, so that it takes raw prompts alone")
    adapted = older_tokenizer(dict(settings), template)
    older = [name for name in older_fields(spec.raw, spec.config) if name not in spec.raw]
    older += [name for name in adapted if adapted[name] != settings.get(name)]
    special = [
        f"config.json or tokenizer_config.json without {', '.join(older)} that it knows; export it with --compat"
    ]
    found = {server: general + special * (is_older and bool(older)) for server, is_older in SERVERS.items()}
    for (server, family), (refused, why) in REFUSALS.items():
        if spec.family.name == family and refused(spec):
            found[server] = [*found[server], why]
    return found


def foreign_code(spec: ModelSpec) -> str | None:
    """What is told of a model whose config.json nobody understands without code of its publisher."""
    if not spec.family.translate:
        return None
    remedy = "export it with --layout native" if spec.family.native else "transformers has no class for it"
    return f"config.json asks for the publisher's Python files; {remedy}"
