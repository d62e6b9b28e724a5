"""Whether a derived family is as fast as a declared one: a step of Qwen3 both ways, in turns.

`python -m benchmarks.derived_speed` takes a small Qwen3 on one core, with packed rows, and prints the median of the
ratios of neighbouring steps. Takes two minutes.
"""

from __future__ import annotations

import logging
import statistics
import time

import torch
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3

from models.architectures import llama
from models.attention.kernels import TORCH
from models.causal_lm import CausalLM
from models.derived.derive import derive
from models.family import Family
from models.loading import SeededStates
from models.spec import ModelSpec

CONFIG = Qwen3Config(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=8000,
)
ROWS, FIRST, SECOND = 2, 200, 312  # two documents in each row
STEPS = 24


def model_of(family: Family, fields: dict[str, object]) -> CausalLM:
    spec = ModelSpec(family, CONFIG, fields, fields)
    spec.set_attention(TORCH)
    return CausalLM(spec, SeededStates(spec, seed=0), torch.float32, torch.device("cpu"))


def seconds(model: CausalLM, ids: torch.Tensor, positions: torch.Tensor) -> float:
    """Of a forward and a backward pass."""
    model.zero_grad()
    begin = time.perf_counter()
    model(ids, positions).float().logsumexp(-1).mean().backward()
    return time.perf_counter() - begin


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    fields = {name: value for name, value in CONFIG.to_dict().items() if value is not None}
    declared = model_of(llama.relative("qwen3", modeling_qwen3, "Qwen3"), fields)
    derived = model_of(derive(CONFIG, fields), fields)
    ids = torch.randint(0, CONFIG.vocab_size, (ROWS, FIRST + SECOND))
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)]).repeat(ROWS, 1)
    ratios = []
    for step in range(STEPS):
        pair = (declared, derived) if step % 2 else (derived, declared)
        took = {id(model): seconds(model, ids, positions) for model in pair}
        ratios.append(took[id(declared)] / took[id(derived)])
    print(f"speed of the derived Qwen3, as a share of the declared one's: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
