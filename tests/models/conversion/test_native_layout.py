"""Shows that `--layout native` gives folders that plain transformers loads, with the same logits, words and prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from data.chat.native.kinds import export_tokenizer
from data.tokenized.tokenizer import load_tokenizer
from models import load_model
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from tests.cases import tiered
from tests.data.published_tokenizers import END_TOKENS, Published
from tests.models.command_line import convert, refusal
from tests.models.helpers import (
    assert_round_trip,
    assert_same_bits,
    change_config,
    change_weights,
    contents,
    joined,
    random_ids,
    read_config,
    read_weights,
)
from tests.models.originals import native_state

CLASSES = {  # by case
    "chatglm3": "GlmForCausalLM",
    "chatglm3-32k": "GlmForCausalLM",
    "baichuan2-7b": "LlamaForCausalLM",
    "baichuan-7b": "LlamaForCausalLM",
    "internlm2": "LlamaForCausalLM",
    "qwen": "Qwen2ForCausalLM",
}
CASE_OF = {"chatglm3": "chatglm3", "baichuan2": "baichuan2-7b", "baichuan": "baichuan-7b"}  # else as the family
CODE = "raise SystemExit('remote code was run')"
NATIVE = ExportOptions(layout="native", add_tokenizer=export_tokenizer)
TEXTS = ["", " Hello,  world!\n\n", "philosophy <|user|> [gMASK]sop </s>", "雪 🤗 <reserved_106> 8 GPUs\t三台", "▁a"]
CHAT = [
    {"role": "system", "content": "Answer briefly. 简短。"},
    {"role": "user", "content": "What is <|user|>?"},
    {"role": "assistant", "content": " A role. 🤗"},
    {"role": "user", "content": "\nTwo\n lines "},
]

Make = Callable[..., Path]


def original(make_case: Make, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of a case as it is published: with code beside the weights, which must never run."""
    folder = make_case(name, {"max_shard_size": "100KB"}, dtype=dtype)
    (folder / "modeling_original.py").write_text(CODE)
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_original.Model"})
    change_weights(folder, lambda tensors: [t.mul_(3) for n, t in tensors.items() if n == "lm_head.weight"])
    return folder


def exported(folder: Path, workspace: Path, options: ExportOptions = NATIVE) -> Path:
    hg_to_pp(folder, workspace / "layers")
    pp_to_hg(workspace / "layers", workspace / "native", options=options)
    return workspace / "native"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", tiered(CLASSES, slow=["baichuan2-7b"]))
def test_plain_transformers_loads_it_with_the_same_logits(
    name: str, dtype: torch.dtype, make_case: Make, tmp_path: Path
) -> None:
    folder = original(make_case, name, dtype)
    native = exported(folder, tmp_path)
    model, loading = AutoModelForCausalLM.from_pretrained(
        native, trust_remote_code=False, output_loading_info=True, dtype="auto"
    )
    assert type(model).__name__ == CLASSES[name]
    assert not any(loading.values()), loading  # no key missing, unexpected or of another shape
    ids = random_ids(2, 40)
    with torch.inference_mode():
        found, expected = model.eval()(ids).logits, load_model(folder)(ids)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.01
    config = read_config(native)
    assert config["model_type"] in CONFIG_MAPPING
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert "auto_map" not in config and not list(native.glob("*.py"))


@pytest.mark.parametrize("name", tiered(CLASSES, slow=["baichuan2-7b"]))
def test_native_folder_is_a_checkpoint_like_any_other(name: str, make_case: Make, tmp_path: Path) -> None:
    """Fused projections are cut into their rows, Baichuan2's head is normalised, nothing else changed or kept."""
    folder = original(make_case, name)
    native = exported(folder, tmp_path)
    tensors = {n: tensor for n, tensor in joined(read_weights(folder)).items() if not n.endswith("inv_freq")}
    expected, found = native_state(read_config(folder), tensors), joined(read_weights(native))
    if name == "baichuan2-7b":
        head = found.pop("lm_head.weight")
        torch.testing.assert_close(head, expected.pop("lm_head.weight"), atol=1e-7, rtol=0)
        torch.testing.assert_close(head.norm(dim=1), torch.ones(len(head)))
    assert_same_bits(found, expected)

    pp_to_hg(tmp_path / "layers", tmp_path / "again", options=NATIVE)
    assert contents(tmp_path / "again") == contents(native)
    back = assert_round_trip(native, tmp_path / "second")
    assert contents(back) == contents(native)
    pp_to_hg(tmp_path / "second" / "layers", tmp_path / "native-of-native", options=NATIVE)
    assert contents(tmp_path / "native-of-native") == contents(native)


@pytest.mark.parametrize("name", ["llama-tied", "mixtral"])
def test_families_of_transformers_are_native_already(name: str, make_case: Make, tmp_path: Path) -> None:
    folder = make_case(name, {"max_shard_size": "100KB"})
    back = assert_round_trip(folder, tmp_path)
    pp_to_hg(tmp_path / "layers", tmp_path / "native", options=NATIVE)
    assert contents(tmp_path / "native") == contents(back)


def test_13b_has_no_native_layout(make_case: Make, tmp_path: Path) -> None:
    hg_to_pp(original(make_case, "baichuan2-13b"), tmp_path / "layers")
    line = refusal("pp_to_hg", tmp_path / "layers", tmp_path / "native", "--layout", "native")
    assert all(part in line for part in (str(tmp_path / "layers"), "baichuan2-13b", "--layout original"))
    assert list(tmp_path.iterdir()) == [tmp_path / "layers"]


@pytest.fixture(params=tiered(END_TOKENS, slow=["baichuan2"]))
def published(request: pytest.FixtureRequest, make_case: Make) -> tuple[str, Path]:
    """A family and a folder with its vocabulary, as it is published."""
    family: str = request.param
    folder = original(make_case, CASE_OF.get(family, family))
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).unlink()
    Published(family, folder)
    return family, folder


@pytest.mark.parametrize("published", tiered(END_TOKENS, slow=["baichuan2", "chatglm3"]), indirect=True)
def test_tokenizer_needs_no_code_and_gives_the_same_ids(published: tuple[str, Path], tmp_path: Path) -> None:
    family, folder = published
    stated = {"eos_token_id": END_TOKENS[family][0], "top_k": 7, "user_token_id": 195}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    layers, native = tmp_path / "layers", tmp_path / "native"
    assert convert("hg_to_pp", folder, layers) == (0, [])
    assert convert("pp_to_hg", layers, native, "--layout", "native", "--verify") == (0, [])

    assert (native / "tokenizer.json").is_file()
    assert not [*native.glob("*.py"), *native.glob("*.model"), *native.glob("*.tiktoken")]
    assert "auto_map" not in (native / "tokenizer_config.json").read_text()
    found, expected = AutoTokenizer.from_pretrained(native, trust_remote_code=False), load_tokenizer(folder)
    for text in TEXTS:
        assert found(text)["input_ids"] == expected(text)["input_ids"]
        ids = found(text, add_special_tokens=False)["input_ids"]
        assert ids == expected(text, add_special_tokens=False)["input_ids"]
        assert found.decode(ids) == expected.decode(ids)
    for length in (2, 4):
        chat = CHAT[family == "baichuan" : length]  # which knows no system message
        prompts = [each.apply_chat_template(chat, add_generation_prompt=True) for each in (found, expected)]
        assert prompts[0]["input_ids"] == prompts[1]["input_ids"]
        assert len(prompts[0]["input_ids"]) > 8

    settings = json.loads((native / "generation_config.json").read_text())
    assert settings == {"eos_token_id": END_TOKENS[family], "top_k": 7, "user_token_id": 195}
    model = AutoModelForCausalLM.from_pretrained(native, trust_remote_code=False)
    assert model.generation_config.eos_token_id == END_TOKENS[family]


def test_end_tokens_are_listed_also_where_there_was_no_list_and_the_original_layout_keeps_its_tokenizer(
    published: tuple[str, Path], tmp_path: Path
) -> None:
    family, folder = published
    back = assert_round_trip(folder, tmp_path)
    pp_to_hg(tmp_path / "layers", tmp_path / "native", options=NATIVE)
    stated = json.loads((tmp_path / "native" / "generation_config.json").read_text())
    assert stated == {"eos_token_id": END_TOKENS[family]}
    (vocabulary,) = [*folder.glob("*.model"), *folder.glob("*.tiktoken")]
    assert (back / vocabulary.name).read_bytes() == vocabulary.read_bytes()
    assert not (back / "tokenizer.json").exists()
