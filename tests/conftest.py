"""What the tests share: tiny real checkpoints, a real tokenizer, the folder of golden files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

if TYPE_CHECKING:
    from tests.ranks import Ranks

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
FAQ = ROOT / "data" / "samples" / "faq.json"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VOCABULARY = 512
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": VOCABULARY,
}
TINY = SMALL | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
BAICHUAN = SMALL | {  # the 13B's fields; with max_position_embeddings they are the 7B's
    "model_type": "baichuan",
    "hidden_act": "silu",
    "model_max_length": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CHATGLM = {
    "model_type": "chatglm",
    "add_qkv_bias": True,
    "ffn_hidden_size": 96,
    "hidden_size": 64,
    "kv_channels": 16,
    "layernorm_epsilon": 1e-5,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_layers": 3,
    "padded_vocab_size": VOCABULARY,
    "seq_length": 256,
    "rmsnorm": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
    "pad_token_id": 0,
}
INTERNLM = SMALL | {
    "model_type": "internlm2",
    "bias": False,
    "hidden_act": "silu",
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
QWEN = SMALL | {
    "model_type": "qwen",
    "intermediate_size": 192,
    "kv_channels": 16,
    "layer_norm_epsilon": 1e-6,
    "no_bias": True,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "seq_length": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
}


# A slow machine is no error: neither a test nor the making of its examples has a time limit.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def write_records(path: Path, count: int) -> None:
    """Write the first records of the FAQ to a file."""
    path.write_text(json.dumps(json.loads(FAQ.read_text(encoding="utf-8"))[:count]), encoding="utf-8")


def pytest_configure() -> None:
    """Use one thread in every process, launched ones too: tiny products wait for a second one, and on a busy core long.

    3,000 products of [400, 64] and [64, 64] took 1.2 s with one thread and 26.5 s with two on a busy machine.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let one worker run a whole file, and one all that share launched processes."""
    group = "ranks" if "ranks" in getattr(item, "fixturenames", ()) else str(item.path)
    item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no core is idle at the end: the shared processes, then other launches."""
    launching = {item.path for item in items if item.get_closest_marker("launched")}
    items.sort(key=lambda item: ("ranks" not in getattr(item, "fixturenames", ()), item.path not in launching))


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> set[str]:
    """The ids of the file's cases that this session runs: what shares launched processes runs no others there."""
    items = (item for item in request.session.items if item.path == request.path)
    return {item.callspec.id for item in items if hasattr(item, "callspec")}


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


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the tests' tokenized data lie, those of launched runs too: not in the user's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("PIPETUNE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Launched processes that the tests of all files share."""
    from tests.ranks import Ranks

    with Ranks(tmp_path_factory.mktemp("ranks")) as shared_ones:
        yield shared_ones


@pytest.fixture
def group() -> Iterator[None]:
    """This process is the only one of a run."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_bar_of_an_earlier_test() -> None:
    """Forget what a library left open when a test made it fail: our own bar would move down a line beside it."""
    getattr(tqdm, "_instances", set()).clear()


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a tiny random model into a folder of its own, tokenizer included."""

    def make(model_type: str = "llama", save: dict[str, Any] | None = None, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(model_type)
        torch.manual_seed(0)
        changes = {"initializer_range": 0.05} | changes
        if model_type in ORIGINALS:
            save_original(folder, model_type, save or {}, **changes)
        else:
            config = CONFIG_MAPPING[model_type](**(TINY | changes))
            model = AutoModelForCausalLM.from_config(config, dtype=changes.get("dtype", torch.float32))
            model.save_pretrained(folder, **(save or {}))
        save_tokenizer(folder)
        return folder

    return make


def save_original(
    folder: Path,
    model_type: str,
    save: dict[str, Any],
    initializer_range: float,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> None:
    """Write a checkpoint of a family that transformers lacks, under the names of its own code."""
    fields, shapes = ORIGINALS[model_type]
    config = fields | {"torch_dtype": str(dtype).removeprefix("torch.")} | changes
    tensors = {}
    for name, shape in shapes(config).items():
        if len(shape) == 2:
            tensor = torch.randn(shape) * initializer_range
        else:  # a norm's weight, a bias, or the buffer of rotary angles
            tensor = torch.randn(shape) * 0.1 + (0 if name.endswith("bias") else 1)
        tensors[name] = tensor.to(dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_torch_state_dict(tensors, folder, **save)


def baichuan_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Baichuan2."""
    vocabulary, width, inner = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for block in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{block}.self_attn.W_pack.weight": (3 * width, width),
            f"model.layers.{block}.self_attn.o_proj.weight": (width, width),
            f"model.layers.{block}.mlp.gate_proj.weight": (inner, width),
            f"model.layers.{block}.mlp.up_proj.weight": (inner, width),
            f"model.layers.{block}.mlp.down_proj.weight": (width, inner),
            f"model.layers.{block}.input_layernorm.weight": (width,),
            f"model.layers.{block}.post_attention_layernorm.weight": (width,),
        }
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


def chatglm_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a ChatGLM3, its stored rotary angles among them."""
    vocabulary, width, inner = config["padded_vocab_size"], config["hidden_size"], config["ffn_hidden_size"]
    heads, groups, head_width = config["num_attention_heads"], config["multi_query_group_num"], config["kv_channels"]
    fused = (heads + 2 * groups) * head_width
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.embedding.word_embeddings.weight": (vocabulary, width),
        "transformer.rotary_pos_emb.inv_freq": (head_width // 4,),
    }
    for block in range(config["num_layers"]):
        layer = f"transformer.encoder.layers.{block}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (width,),
            f"{layer}.self_attention.query_key_value.weight": (fused, width),
            f"{layer}.self_attention.query_key_value.bias": (fused,),
            f"{layer}.self_attention.dense.weight": (width, heads * head_width),
            f"{layer}.post_attention_layernorm.weight": (width,),
            f"{layer}.mlp.dense_h_to_4h.weight": (2 * inner, width),
            f"{layer}.mlp.dense_4h_to_h.weight": (width, inner),
        }
    return shapes | {
        "transformer.encoder.final_layernorm.weight": (width,),
        "transformer.output_layer.weight": (vocabulary, width),
    }


def internlm_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of an InternLM2."""
    vocabulary, width, inner = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.tok_embeddings.weight": (vocabulary, width)}
    for block in range(config["num_hidden_layers"]):
        layer = f"model.layers.{block}"
        shapes |= {
            f"{layer}.attention.wqkv.weight": ((heads + 2 * keys) * width // heads, width),
            f"{layer}.attention.wo.weight": (width, width),
            f"{layer}.feed_forward.w1.weight": (inner, width),
            f"{layer}.feed_forward.w3.weight": (inner, width),
            f"{layer}.feed_forward.w2.weight": (width, inner),
            f"{layer}.attention_norm.weight": (width,),
            f"{layer}.ffn_norm.weight": (width,),
        }
    return shapes | {"model.norm.weight": (width,), "output.weight": (vocabulary, width)}


def qwen_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of the first Qwen."""
    vocabulary, width, inner = config["vocab_size"], config["hidden_size"], config["intermediate_size"] // 2
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (vocabulary, width)}
    for block in range(config["num_hidden_layers"]):
        layer = f"transformer.h.{block}"
        shapes |= {
            f"{layer}.ln_1.weight": (width,),
            f"{layer}.attn.c_attn.weight": (3 * width, width),
            f"{layer}.attn.c_attn.bias": (3 * width,),
            f"{layer}.attn.c_proj.weight": (width, width),
            f"{layer}.ln_2.weight": (width,),
            f"{layer}.mlp.w1.weight": (inner, width),
            f"{layer}.mlp.w2.weight": (inner, width),
            f"{layer}.mlp.c_proj.weight": (width, inner),
        }
    return shapes | {"transformer.ln_f.weight": (width,), "lm_head.weight": (vocabulary, width)}


ORIGINALS = {
    "baichuan": (BAICHUAN, baichuan_shapes),
    "chatglm": (CHATGLM, chatglm_shapes),
    "internlm2": (INTERNLM, internlm_shapes),
    "qwen": (QWEN, qwen_shapes),
}
