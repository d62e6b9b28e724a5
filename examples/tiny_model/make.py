"""A tiny Qwen3 with random weights, for trying the stories in this folder on a CPU.

python examples/tiny_model/make.py [FOLDER]

It has three blocks, a byte-level tokenizer trained on the stories' own records, and a chat template in the manner of
Qwen's: ChatML, tools in the system message, calls as JSON between <tool_call> and </tool_call>. It knows nothing, so
all that it says afterwards is what it learnt. Making it takes some seconds, and three megabytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

FOLDER = "runs/tiny-qwen3"
HERE = Path(__file__).resolve().parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCABULARY = 2048
CONTEXT = 1024


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER)
    found = [*HERE.parent.glob("*/*.json*"), *HERE.parent.glob("*/*/*.jsonl")]
    texts = [path for path in found if path.parent.name != "preferences"]  # whose model brings its own tokenizer
    tokenizer = Tokenizer(models.BPE())
    characters = pre_tokenizers.Split(Regex(r"[\u3000-\u9fff\uff00-\uffef]"), "isolated")  # or sentences become tokens
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([characters, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((path.read_text(encoding="utf-8") for path in sorted(texts)), trainer)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY + len(WORDS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    print(f"{folder}: Qwen3 of {sum(weight.numel() for weight in model.parameters()):,} random weights")


if __name__ == "__main__":
    main()
