"""The names of an export's tensors are those that text-generation-inference asks for.

Its own classes read them one by one, by names that stand in its source (3.3), and pass over all others. Where names
differ, docs/serving.md says so.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from tests.models.command_line import convert

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
NORMS = ["input_layernorm", "post_attention_layernorm"]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
EXPERTS = [f"block_sparse_moe.experts.{expert}.{name}" for expert in range(4) for name in ("w1", "w2", "w3")]
BLOOM = ["self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", *NORMS]
ENDS = {"model.embed_tokens.weight", "model.norm.weight"}


def of_llama(blocks: int, names: list[str], tied: bool = False) -> set[str]:
    inner = {f"model.layers.{block}.{name}.weight" for block in range(blocks) for name in names}
    return ENDS | inner | (set() if tied else {"lm_head.weight"})


def of_bloom(blocks: int) -> set[str]:
    outer = ["word_embeddings_layernorm", "ln_f", *(f"h.{block}.{name}" for block in range(blocks) for name in BLOOM)]
    return {"word_embeddings.weight"} | {f"{name}.{kind}" for name in outer for kind in ("weight", "bias")}


def names_in(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found


@pytest.mark.parametrize(
    ("name", "how", "asked"),
    [
        ("llama-tiny", ["--compat"], of_llama(3, [*ATTENTION, *MLP, *NORMS], tied=True)),
        ("llama-untied-tiny", ["--compat"], of_llama(3, [*ATTENTION, *MLP, *NORMS])),
        ("baichuan2-7b-tiny", ["--layout", "native"], of_llama(3, [*ATTENTION, *MLP, *NORMS])),
        ("mixtral-tiny", ["--compat"], of_llama(3, [*ATTENTION, *NORMS, "block_sparse_moe.gate", *EXPERTS])),
        ("bloom-tiny", ["--compat"], {f"transformer.{name}" for name in of_bloom(3)}),  # which it does not find
    ],
)
def test_an_export_has_the_names_that_are_asked_for(
    name: str, how: list[str], asked: set[str], shared: Path, tmp_path: Path
) -> None:
    convert("hg_to_pp", shared / "golden" / name, tmp_path / "pp")
    convert("pp_to_hg", tmp_path / "pp", tmp_path / "hf", *how)
    assert names_in(tmp_path / "hf") == asked
