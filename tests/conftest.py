"""What the tests share: tiny real checkpoints, a real tokenizer, the folder of golden files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
FAQ = ROOT / "data" / "samples" / "faq.json"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VOCABULARY = 512
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden files and real data beside the project; the test is skipped where it is absent."""
    if not (SHARED / "golden").is_dir():
        pytest.skip(f"no golden files: {SHARED} is absent")
    return SHARED


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer trained on the FAQ, with a ChatML template, as a HuggingFace folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, chat_template: str | None = CHATML) -> None:
    """Train the tests' tokenizer and write its files into `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<unk>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([FAQ.read_text(encoding="utf-8")], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a tiny random model with transformers' own `save_pretrained`, tokenizer included."""

    def make(model_type: str = "llama", save: dict[str, object] | None = None, **changes: object) -> Path:
        folder = tmp_path_factory.mktemp(model_type)
        torch.manual_seed(0)
        config = CONFIG_MAPPING[model_type](**(TINY | {"initializer_range": 0.05} | changes))
        model = AutoModelForCausalLM.from_config(config, dtype=changes.get("dtype", torch.float32))
        model.save_pretrained(folder, **(save or {}))
        save_tokenizer(folder)
        return folder

    return make
