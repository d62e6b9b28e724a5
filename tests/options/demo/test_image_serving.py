"""Servers are asked about an image: from an export they answer with the tokens of our own generation."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from data.settings import Pixels
from models.conversion.to_huggingface import pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from options.demo.chat import ChatSession
from options.demo.chat_model import AnswerOptions, ChatModel
from options.demo.generation import GREEDY
from tests.models.images.conftest import golden_of
from tests.models.test_serving import COUNT, SERVERS, python_of, serving, whole

__all__ = ["python_of"]  # a fixture

ASKED = "What is it?"
TEXT = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # as vLLM needs them


def exported(golden: Path, folder: Path) -> Path:
    """An export of a tiny LLaVA of random weights that says more than one word."""
    torch.manual_seed(0)
    config: Any = transformers.AutoConfig.from_pretrained(golden)
    for name, value in (TEXT | {"initializer_range": 0.2}).items():
        setattr(config.text_config, name, value)
    config.text_config.eos_token_id = None
    kind: Any = transformers.AutoModelForImageTextToText
    shutil.copytree(golden, folder / "base", ignore=shutil.ignore_patterns("*.safetensors", "expected*", "records*"))
    model = kind.from_config(config)
    model.save_pretrained(folder / "base")
    # With the names of published checkpoints, which vLLM asks for.
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    state = revert_weight_conversion(model, model.state_dict())
    save_file(state, folder / "base" / "model.safetensors", {"format": "pt"})
    hg_to_pp(folder / "base", folder / "layers")
    pp_to_hg(folder / "layers", folder / "served")
    return folder / "served"


@pytest.mark.longest
@pytest.mark.parametrize("name", ["transformers"])  # vLLM, which needs torchvision, by hand (docs/serving.md)
def test_a_question_about_an_image_is_answered(
    name: str, python_of: Callable[[str], Path], shared: Path, tmp_path: Path
) -> None:
    golden = golden_of(shared, "llava-tiny").folder
    folder, picture = exported(golden, tmp_path), golden / "images" / "a.png"
    expected = []
    for other in (picture, golden / "images" / "b.png"):
        chat = ChatSession(
            ChatModel(folder, pixels=Pixels()), AnswerOptions(COUNT, GREEDY), pytest.fail, pictures=[str(other)]
        )
        expected.append(whole("".join(chat.ask(ASKED))))
    assert expected[0] != expected[1], "else this shows nothing"

    address = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": ASKED}]
    with serving(SERVERS[name], python_of(name), folder) as service:
        answer = service.ask("chat.completions.create", messages=[{"role": "user", "content": content}])
    assert whole(answer["choices"][0]["message"]["content"]) == expected[0]
