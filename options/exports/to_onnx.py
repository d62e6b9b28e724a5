"""Write a model folder as ONNX with a key-value cache, for onnxruntime.

torch's exporter traces the layers that demo.py runs, with optimum's names of inputs and outputs. onnxruntime has to
compute the model's own logits and tokens before the folder appears.

In the traced model the key-value cache is an input and an output, keys and values are concatenated to it instead of
written into a buffer, attention is plain arithmetic under a mask, and padding is given by a mask. A token's position is
its place in the row, padding counted: rotary angles and ALiBi biases only depend on distances. Learned positions begin
behind the padding.

Everything is in fp32, which holds each bf16 and fp16 number exactly. Cost: 4 bytes a parameter on the disk, up to five
times that of memory, and a few seconds a block.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from models.api import read_spec
from models.attention.cache import KeyValueCache
from models.attention.kernels import EAGER
from models.attention.rope import depends_on_length
from models.causal_lm import CausalLM
from models.checkpoint.layout import resolve, side_files
from models.checkpoint.publish import publish_folder
from models.checkpoint.side_files import copy_files
from models.checkpoint.source import open_source
from models.config_json import write_json
from models.conversion.check import ALONE, foreign_code
from models.conversion.to_huggingface import with_dtype
from models.errors import CheckpointError
from models.spec import ModelSpec

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
ROW, PAST = "batch_size", "past_sequence_length"
PROMPT, PADDING, ANSWER = 24, 5, 8  # tokens of the check; its second row begins with padding
TOLERANCE = 1e-4  # of logits; as a share of the largest where that is above 1

Past = list[tuple[Tensor, Tensor]]  # for each block keys and values [B, heads, tokens, width]


def hg_to_onnx(input_path: str | Path, save_path: str | Path, overwrite: bool = False) -> str:
    """Write the ONNX folder of a model folder; return a line on the check.

    Raises:
        CheckpointError: a package is missing, the input is damaged, unknown or of a kind that one graph cannot
            compute, the target cannot be written, or onnxruntime computes something else.
    """
    begun = time.monotonic()
    folder = resolve(input_path)
    spec = read_spec(folder)
    spec.check_writes(folder)
    if spec.family.sees:
        what = "a checkpoint with its tower of images"
        raise CheckpointError(f"{folder}: {what}; expected the HuggingFace folder that pp_to_hg makes of it")
    if obstacle := _obstacle(spec):
        raise CheckpointError(f"{folder}: {obstacle}")
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise CheckpointError(f"hg_to_onnx needs {', '.join(missing)}: pip install {' '.join(missing)}")
    source = open_source(folder, spec)
    with (
        publish_folder(Path(save_path), overwrite, [folder]) as target,
        tqdm(desc="hg_to_onnx: reading weights", bar_format="{desc} [{elapsed}]") as bar,
    ):
        model = CausalLM(spec, source, torch.float32, torch.device("cpu")).eval()
        bar.set_description_str("hg_to_onnx: tracing")
        program = _trace(model)
        bar.set_description_str("hg_to_onnx: writing")
        program.save(target / "model.onnx")
        del program
        copy_files(folder, target, side_files(folder))
        write_json(target / "config.json", with_dtype(spec.raw, torch.float32))
        bar.set_description_str("hg_to_onnx: asking onnxruntime")
        found = _compare(model, target / "model.onnx", save_path)
    stored = str(source.dtype()).removeprefix("torch.")
    seconds = f"{time.monotonic() - begun:.0f} s in all"
    return f"{save_path}: float32 (stored: {stored}); {found}; {seconds}{ALONE if spec.is_part else ''}"


def _obstacle(spec: ModelSpec) -> str | None:
    """Say why no single graph can compute a model; None if one can."""
    if spec.has_experts:
        return "a mixture of experts, where each token takes other weights, which one graph cannot do"
    if depends_on_length(spec.config):
        rope = spec.config.rope_parameters["rope_type"]
        return f"rope_type {rope}, where angles depend on a text's length, which one graph cannot do"
    return foreign_code(spec)


class GivenCache(KeyValueCache):
    """A cache passed in; `present` is the past with this pass's keys and values."""

    def __init__(self, past: Past) -> None:
        super().__init__()
        self.present: Past = []
        self._past = past
        if past:
            self.lengths = [past[0][0].shape[2]]

    def update(self, keys: Tensor, values: Tensor, block: int, *_: Any) -> tuple[Tensor, Tensor]:
        if self._past:
            keys, values = (torch.cat(both, dim=2) for both in zip(self._past[block], (keys, values), strict=True))
        self.present.append((keys, values))
        return keys, values


class TracedModel(nn.Module):
    """A model as the function to trace, with plain attention."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        model.spec.set_attention(EAGER)
        self.model = model
        self.positions = model.spec.positions()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: Past) -> tuple[Tensor, Past]:
        """Compute logits [B, S, V] for `input_ids` [B, S], and all keys and values so far.

        Args:
            attention_mask: [B, tokens in `past` + S]; 0 for padding, which is on the left.
            past: what the pass before gave; in the first pass tensors without tokens, or none.
        """
        cache = GivenCache(past)
        places = cache.longest + torch.arange(input_ids.shape[1]).expand_as(input_ids)
        learned = (attention_mask.cumsum(dim=1) - 1)[:, cache.longest :].clamp(min=0)
        hidden: Tensor = self.model.embedding((input_ids, learned))[0]
        arguments = self.positions.arguments(hidden, places, cache)
        padding = attention_mask[:, None, None] == 0
        for each in arguments.values():
            mask = each["attention_mask"].masked_fill(padding, torch.finfo(hidden.dtype).min)
            each |= {"attention_mask": mask, self.positions.cache_argument: cache, "use_cache": True}
        for block in self.model.blocks:
            hidden, _ = block._run(hidden, places, arguments[block.kind])
        return self.model.head.project(self.model.head.norm(hidden)), cache.present


def _trace(model: CausalLM) -> Any:
    """Export a model with free numbers of rows and tokens."""
    traced = TracedModel(model).eval()
    ids = torch.zeros(2, 3, dtype=torch.int64)  # 0 and 1 would be taken for constants
    with torch.no_grad():
        past = traced(ids, torch.ones_like(ids), [])[1]
    caches = [({0: ROW, 2: PAST}, {0: ROW, 2: PAST})] * len(past)
    names = [f"{block}.{part}" for block, part in product(range(len(past)), ("key", "value"))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names that several axes share, and deprecations within torch
        program: Any = torch.onnx.export(
            traced,
            (ids, torch.ones(2, 6, dtype=torch.int64), past),
            dynamic_shapes=({0: ROW, 1: "sequence_length"}, {0: ROW, 1: "total_sequence_length"}, caches),
            input_names=["input_ids", "attention_mask", *(f"past_key_values.{name}" for name in names)],
            output_names=["logits", *(f"present.{name}" for name in names)],
            verbose=False,
        )
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, with paths of this machine
    return program


@torch.no_grad()
def _compare(model: CausalLM, path: Path, save_path: str | Path) -> str:
    """Compare onnxruntime's greedy answers with passes without a cache."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    past = {each.name: torch.zeros(2, each.shape[1], 0, each.shape[3]).numpy() for each in session.get_inputs()[2:]}
    ids = torch.randint(model.spec.config.vocab_size, (2, PROMPT), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    texts, passes = ids, []
    for _ in range(ANSWER):
        logits, *present = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()} | past)
        past = dict(zip(past, present, strict=True))
        passes.append(torch.from_numpy(logits))
        ids = passes[-1][:, -1:].argmax(dim=-1)
        texts, mask = torch.cat([texts, ids], dim=1), torch.cat([mask, torch.ones_like(ids)], dim=1)
    found, differences, same = torch.cat(passes, dim=1), [], 0
    for row, begin in enumerate((0, PADDING)):
        expected = model(texts[row : row + 1, begin:-1])[0]
        differences.append((found[row, begin:] - expected).abs().max() / expected.abs().max().clamp(min=1.0))
        same += int((expected[-ANSWER:].argmax(dim=-1) == texts[row, PROMPT:]).sum())
    worst = float(torch.stack(differences).max())  # NaN where one is
    text = f"onnxruntime's logits differ by {worst:.1e}, {same} of {2 * ANSWER} greedy tokens are the same"
    if not (worst <= TOLERANCE and same == 2 * ANSWER):
        raise CheckpointError(f"{save_path}: {text}; expected at most {TOLERANCE:.0e} and all; the export is removed")
    return text
