"""Llama, and the naming table that mistral, qwen2 and qwen3 share with it.

Grouped-query attention, tied or untied heads and the rope scaling of Llama 3 are all transformers' own: they follow
from config.json. Checkpoints of 2023 also store `rotary_emb.inv_freq` in every block, which is computed, not learned.
"""

from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from models.architectures.family import Family, Rule, Tie

FAMILY = Family(
    name="llama",
    decoder_layer=LlamaDecoderLayer,
    norm=lambda config: LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=LlamaRotaryEmbedding,
    embedding=(Rule("model.embed_tokens.weight", "embed_tokens.weight"),),
    block=(Rule("model.layers.{i}.*", "block.*"),),
    head=(Rule("model.norm.weight", "norm.weight"), Rule("lm_head.weight", "lm_head.weight")),
    tie=Tie(embedding="embed_tokens.weight", head="lm_head.weight"),
    carried=(r"\.rotary_emb\.inv_freq$",),
)
