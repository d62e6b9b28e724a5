"""Shows that `--compat` lets transformers 4 read what transformers 5 wrote, and changes nothing for transformers 5."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.conversion.to_pipeline import hg_to_pp
from tests.conftest import ORIGINALS, TINY
from tests.environments import environment
from tests.models.cases import CASES
from tests.models.command_line import convert, refusal
from tests.models.conversion.older_transformers import CHAT, TEXT
from tests.models.helpers import change_config, compatible, oracle, random_ids, read_config, side_files

Make = Callable[..., Path]

# By release, the cases whose class it has. What it would get wrong whatever config.json says is left out: windows that
# differ between blocks, and in 4.45 Phi-3 with a part of each head rotated.
RELEASES = {
    "4.45.2": "bloom bloom-untied llama-tied llama-untied llama-dynamic llama-rope-scaling mistral mixtral qwen2 "
    "qwen2-tied phi3 gemma2 baichuan2-7b",
    "4.51.3": "bloom llama-tied llama-dynamic llama-rope-scaling mistral mixtral qwen2 qwen3 qwen3-tied qwen3_moe "
    "qwen3_moe-some-dense phi3 phi3-long olmo2 glm glm-tied glm4 gemma2 gemma3 baichuan2-7b chatglm3 chatglm3-32k",
}


@pytest.fixture
def checkpoint(make_case: Make) -> Make:
    """A function that writes a case as transformers 5 does, with a rotary base that no family has by default."""

    def make(name: str) -> Path:
        model_type, changes = CASES[name].model_type, dict[str, Any]()
        if model_type not in (*ORIGINALS, "bloom", "gemma3_text"):
            rope = {"rope_type": "default"} | CASES[name].changes.get("rope_parameters", {})
            changes["rope_parameters"] = rope | {"rope_theta": 50_000.0}
        if model_type == "phi3":  # 4.45 applies windows in flash attention alone
            changes["sliding_window"] = None
        folder = make_case(name, **changes)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokenizer.add_special_tokens({"extra_special_tokens": ["<extra>"]})
        tokenizer.save_pretrained(folder)  # with the options that it was loaded with
        return folder

    return make


@pytest.mark.longest
@pytest.mark.parametrize("release", RELEASES)
def test_an_older_transformers_computes_the_same(release: str, checkpoint: Make, tmp_path: Path) -> None:
    python = environment(tmp_path / "environment", f"transformers=={release}")
    folders = {name: compatible(checkpoint(name), tmp_path / name) for name in RELEASES[release].split()}
    ids = random_ids(2, 48)
    torch.save(ids, tmp_path / "ids.pt")
    script = Path(__file__).with_name("older_transformers.py")
    ended = subprocess.run(
        [python, script, tmp_path / "ids.pt", *folders.values()], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    for folder in folders.values():
        seen, model = torch.load(folder / "seen.pt", weights_only=True), oracle(folder)
        assert seen["release"] == release
        assert seen["class"] == type(model).__name__
        assert seen["dtype"] == torch.float32
        with torch.inference_mode():
            torch.testing.assert_close(seen["logits"], model(ids).logits, atol=1e-4, rtol=1e-4)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert seen["text"] == tokenizer(TEXT)["input_ids"]
        assert seen["chat"] == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize("name", ["llama-rope-scaling", "qwen3_moe", "phi3-long", "gemma3", "bloom"])
def test_transformers_5_computes_the_same(name: str, checkpoint: Make, tmp_path: Path) -> None:
    folder, ids = checkpoint(name), random_ids(2, 48)
    found = compatible(folder, tmp_path)
    assert read_config(found).items() >= read_config(folder).items()
    with torch.inference_mode():
        torch.testing.assert_close(oracle(found)(ids).logits, oracle(folder)(ids).logits, atol=0, rtol=0)
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (found, folder)]
    assert tokenizers[0](TEXT)["input_ids"] == tokenizers[1](TEXT)["input_ids"]
    prompts = [each.apply_chat_template(CHAT)["input_ids"] for each in tokenizers]
    assert prompts[0] == prompts[1]


VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
STRETCHED = {"rope_type": "linear", "factor": 8.0}
BASE = {"rope_theta": 50_000.0}
# By kind of model: the settings of its decoder, and what transformers 4 calls them there.
ROTARY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"full_attention": BASE | STRETCHED, "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}},
        BASE | {"rope_scaling": STRETCHED, "rope_local_base_freq": 2e4},
    ),
    "mistral3": (BASE | {"rope_type": "default"}, BASE),
    "gpt_neox": (
        BASE | STRETCHED | {"partial_rotary_factor": 0.5},
        {"rotary_emb_base": 50_000.0, "rotary_pct": 0.5, "rope_scaling": STRETCHED},
    ),
}
PARTS = {"gemma3": ("gemma3_text", "siglip_vision_model"), "mistral3": ("mistral", "pixtral")}


@pytest.mark.parametrize("model_type", ROTARY)
def test_angles_are_said_where_older_releases_look_for_them(model_type: str, tmp_path: Path) -> None:
    rope, older = ROTARY[model_type]
    text, vision = PARTS.get(model_type, (model_type, None))
    fields: dict[str, Any] = TINY | {"model_type": text, "rope_parameters": rope}
    if vision:
        fields = {"text_config": fields, "vision_config": VISION | {"model_type": vision}}
    config = CONFIG_MAPPING[model_type](**fields)
    make = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    make.from_config(config).save_pretrained(tmp_path / "base")
    found = compatible(tmp_path / "base", tmp_path)
    said = read_config(found)
    assert (said["text_config"] if vision else said).items() >= older.items()
    assert (
        AutoConfig.from_pretrained(found).get_text_config().rope_parameters == config.get_text_config().rope_parameters
    )


def test_only_the_settings_change_and_leftovers_go(checkpoint: Make, tmp_path: Path) -> None:
    folder = checkpoint("llama-tied")
    change_config(folder, _name_or_path="/home/somebody/base")
    hg_to_pp(folder, tmp_path / "layers")
    assert convert("pp_to_hg", tmp_path / "layers", tmp_path / "out", "--compat") == (0, [])

    before, after = side_files(folder), side_files(tmp_path / "out")
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"config.json", "tokenizer_config.json"}
    config = read_config(tmp_path / "out")
    assert (config["rope_theta"], config["torch_dtype"]) == (50_000.0, "float32")
    assert "_name_or_path" not in config
    settings = json.loads(after["tokenizer_config.json"])
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<extra>"]
    assert settings["chat_template"] == (folder / "chat_template.jinja").read_text()
    assert not settings.keys() & {"is_local", "local_files_only", "name_or_path"}
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "out").iterdir()} == {0o044}


def test_a_folder_that_older_releases_read_keeps_what_it_says(checkpoint: Make, tmp_path: Path) -> None:
    folder = checkpoint("llama-rope-scaling")
    fields = read_config(compatible(folder, tmp_path / "once"))
    del fields["rope_parameters"], fields["dtype"]
    (folder / "config.json").write_text(json.dumps(fields))
    assert read_config(compatible(folder, tmp_path / "twice")) == fields


def test_settings_of_a_tokenizer_that_cannot_be_read_are_refused(checkpoint: Make, tmp_path: Path) -> None:
    folder = checkpoint("llama-tied")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": ')
    hg_to_pp(folder, tmp_path / "layers")
    assert "tokenizer_config.json: line 1" in refusal("pp_to_hg", tmp_path / "layers", tmp_path / "out", "--compat")
