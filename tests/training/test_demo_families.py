"""Every family: what demo.py answers from the pipeline layout is what transformers generates from the export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.chat.messages import Said
from data.chat.native.kinds import export_tokenizer
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from models.generation import GREEDY, generate_many
from tests.conftest import ORIGINALS, VOCABULARY
from tests.models.cases import CASES
from tests.models.helpers import change_weights, oracle
from tests.models.originals import answer_of_original
from training.demo.chat import Chat
from training.demo.speaker import INCOMPLETE, Speaker, Wishes

NEW = 64
TIED, NOT_IN_TRANSFORMERS = "qwen3-tied", ("baichuan-13b", "baichuan2-13b")
NAMES = [*(name for name in CASES if not name.endswith("tied")), TIED]
USUAL = ("bloom", "mistral-window")


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.longest) for name in NAMES]
)
def test_the_demo_answers_what_transformers_generates(
    name: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model_type, changes = CASES[name]
    wide = {"initializer_range": 0.3, "tie_word_embeddings": name == TIED}  # so that a model does not repeat itself
    folder = make_checkpoint(model_type, **changes | wide)
    if model_type == "baichuan":
        change_weights(folder, say_known_words)
    hg_to_pp(folder, tmp_path / "layers")
    native = model_type in ORIGINALS and name not in NOT_IN_TRANSFORMERS
    options = ExportOptions(layout="native", add_tokenizer=export_tokenizer) if native else ExportOptions()
    pp_to_hg(tmp_path / "layers", tmp_path / "export", options=options)
    speaker = Speaker(tmp_path / "layers")
    speaker.context = None  # which for some of these models is shorter than the answer
    speaker._stop = set()  # so that every answer has all its tokens
    prompt = speaker.encode([Said("user", "What is Pipetune?")])
    expected = generated(tmp_path / "export", prompt, transformers=name not in NOT_IN_TRANSFORMERS)
    assert len(expected) == NEW
    assert len(set(expected)) > NEW // 8, "too monotonous to show anything"
    wishes = Wishes(NEW, GREEDY)
    request = speaker.request(prompt, wishes)
    assert [token for _, token in generate_many(speaker.model, [request])] == expected
    shown = "".join(Chat(speaker, wishes, print).ask("What is Pipetune?"))
    text = speaker.tokenizer.decode(expected).lstrip()
    assert shown and shown == text.rstrip(INCOMPLETE), "half a character at the end is held back"


def say_known_words(weights: dict[str, Tensor]) -> None:
    """The first Baichuan has 64,000 words, of which the tokenizer here knows few: let the others be less likely."""
    if (head := weights.get("lm_head.weight")) is not None:
        head[VOCABULARY:] = 0


def generated(export: Path, prompt: list[int], transformers: bool) -> list[int]:
    """NEW tokens, greedily, by transformers or by what stands in for it."""
    if not transformers:
        return answer_of_original(export, prompt, NEW)
    model = oracle(export)
    model.generation_config.eos_token_id = None
    text = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    ids: list[int] = text[0, len(prompt) :].tolist()
    return ids
