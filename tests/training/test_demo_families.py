"""Every family: what demo.py answers from the pipeline layout is what transformers generates from the export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data.chat.messages import Said
from data.chat.native_tokenizers import export_tokenizer
from models.checkpoint.convert import hg_to_pp
from models.checkpoint.export import ExportOptions, pp_to_hg
from models.generation.generate import generate_many
from models.generation.sampling import GREEDY
from tests.conftest import ORIGINALS
from tests.models.cases import CASES
from tests.models.helpers import oracle
from training.demo.chat import Chat
from training.demo.speaker import Speaker, Wishes

NEW = 64
ALIBI = ("baichuan-13b", "baichuan2-13b")  # which transformers lacks
NAMES = [name for name in CASES if not name.endswith("tied") and name not in ALIBI]
USUAL = ("bloom", "mistral-window")


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.longest) for name in NAMES]
)
def test_the_demo_answers_what_transformers_generates(
    name: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model_type, changes = CASES[name]
    wide = {"initializer_range": 0.3, "tie_word_embeddings": False}  # so that a model does not repeat itself
    hg_to_pp(make_checkpoint(model_type, **changes | wide), tmp_path / "layers")
    options = (
        ExportOptions(layout="native", add_tokenizer=export_tokenizer) if model_type in ORIGINALS else ExportOptions()
    )
    pp_to_hg(tmp_path / "layers", tmp_path / "export", options=options)
    speaker = Speaker(tmp_path / "layers")
    speaker.context = None  # which for some of these models is shorter than the answer
    prompt = speaker.encode([Said("user", "What is Pipetune?")])
    theirs = oracle(tmp_path / "export").generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, pad_token_id=0
    )
    expected = theirs[0, len(prompt) :].tolist()
    wishes = Wishes(NEW, GREEDY)
    request = speaker.request(prompt, wishes)
    assert len([token for _, token in generate_many(speaker.model, [request])]) == len(expected)
    stopped = [2] if expected[-1] == 2 else []
    assert request.text[len(prompt) :] + stopped == expected
    assert len(set(expected)) > len(expected) // 3, "too monotonous to show anything"
    text = speaker.tokenizer.decode(request.text[len(prompt) :]).lstrip()
    assert text.startswith("".join(Chat(speaker, wishes, print).ask("What is Pipetune?")))
