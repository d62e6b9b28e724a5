"""Answers with drafts are those without, drafts are those of the formula, and what became of them is counted right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.api import load_model
from models.attention.cache import KeyValueCache
from models.conversion.to_pipeline import hg_to_pp
from models.errors import CheckpointError
from options.demo.command_line import make_parser, open_demo
from options.demo.drafts import Drafter, LayerInUse
from options.demo.generation import GREEDY, Request, Sampling, generate_many
from tests.cases import tiered
from tests.options.demo.conftest import RunDemo, run_demo
from tests.options.multi_token.folders import add_layers_ahead
from tests.options.multi_token.test_golden import FOLDERS
from training.distributed.processes import ProcessInfo
from training.errors import ConfigError

__all__ = ["run_demo"]

Make = Callable[..., Path]
NEW = 16
WORDS = 12  # so few that random drafts are right now and then
PROMPTS = [[3], [5, 1, 4, 1, 5, 9, 2, 6]]
SAMPLED = Sampling(temperature=1.0, top_p=1.0, seed=1)
PENALISED = Sampling(temperature=0.7, repetition_penalty=1.3, seed=2)
CYCLE = [4, 9, 2, 7, 11, 3]


def make_folder(make_checkpoint: Make, depth: int, **changes: Any) -> Path:
    words = {"vocab_size": WORDS, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    folder = make_checkpoint("llama", initializer_range=0.3, **({"tie_word_embeddings": False} | words | changes))
    add_layers_ahead(folder, depth)
    return folder


@pytest.fixture(scope="module")
def two_deep(make_checkpoint: Make) -> Path:
    return make_folder(make_checkpoint, 2)


def ask(generate: Callable[[list[Request]], Any], sampling: Sampling, stop: set[int]) -> list[list[int]]:
    """Answer the prompts; the answers with what ended them."""
    requests = [Request(prompt, NEW, stop, sampling) for prompt in PROMPTS]
    written: dict[Request, list[Any]] = {request: [] for request in requests}
    for request, token in generate(requests):
        written[request].append(token)
    return list(written.values())


def assert_same_answers(drafter: Drafter, folder: Path) -> None:
    plain = load_model(folder)
    for sampling, stop in ((GREEDY, set[int]()), (SAMPLED, set[int]()), (PENALISED, {6})):
        wanted = ask(lambda requests: generate_many(plain, requests, rows=1), sampling, stop)
        assert stop or [len(each) for each in wanted] == [NEW] * len(PROMPTS)
        assert ask(drafter.generate, sampling, stop) == wanted


class Prompted(Drafter):
    """Drafts that are right as far as a test says: of a text of n tokens the first n % 4 of three."""

    def _draft(self, text: list[int], hidden: Tensor, count: int) -> list[int]:
        drafts = super()._draft(text, hidden, count)
        with torch.inference_mode():
            for place in range(min(len(text) % 4, count)):
                logits = self._model(torch.tensor([[*text, *drafts[:place]]]))
                drafts[place] = int(logits[0, -1].argmax())
        return drafts


@pytest.mark.parametrize("drafts", tiered([0, 1, 2, 5], quick=["0"]))
def test_answers_are_those_without_drafts(drafts: int, two_deep: Path) -> None:
    drafter = Drafter(load_model(two_deep, ahead=True), drafts)
    assert_same_answers(drafter, two_deep)
    tally = drafter.tally
    assert 0 < tally.accepted < tally.drafted and tally.steps < tally.tokens


@pytest.mark.slow
def test_a_tied_model_drafts(make_checkpoint: Make) -> None:
    folder = make_folder(make_checkpoint, 1, tie_word_embeddings=True)
    assert_same_answers(Drafter(load_model(folder, ahead=True)), folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_known_models_draft(name: str, shared: Path) -> None:
    folder = shared / "golden" / "mtp" / name
    drafter = Prompted(load_model(folder, ahead=True), 3)
    assert_same_answers(drafter, folder)
    assert drafter.tally.accepted > NEW // 4


def draft_anew(drafter: Drafter, text: list[int], count: int) -> list[int]:
    """Draft by whole passes over the text, without a cache."""
    model, layers = drafter._model, list(drafter._ahead)
    norm, words = model.head.norm, model.embedding.embed_tokens
    states, known = model.activations(torch.tensor([text[:-1]]))[0], list(text)
    given = states = norm(states) if layers[0].norm else states
    for k in range(1, count + 1):
        place = min(k, len(layers))
        given = states if k <= len(layers) else torch.cat([given, states[:, -1:]], dim=1)
        embedded = words(torch.tensor([known[place:]]))
        states = layers[place - 1](embedded, given, torch.arange(given.shape[1])[None])
        known.append(int(model.head.project(states if layers[0].norm else norm(states))[0, -1].argmax()))
    return known[len(text) :]


def assert_drafts_of_the_formula(folder: Path, drafts: int, patch: pytest.MonkeyPatch) -> None:
    drafter, wrong = Drafter(load_model(folder, ahead=True), drafts), list[Any]()
    draft = drafter._draft

    def compared(text: list[int], hidden: Tensor, count: int) -> list[int]:
        found = draft(text, hidden, count)
        if found != (wanted := draft_anew(drafter, text, count)):
            wrong.append((text, found, wanted))
        return found

    patch.setattr(drafter, "_draft", compared)
    ask(drafter.generate, SAMPLED, set())
    assert drafter.tally.accepted, "nothing to go on from"
    assert not wrong


@pytest.mark.parametrize("drafts", tiered([2, 4], quick=["2"]))
def test_drafts_are_those_of_whole_passes(drafts: int, two_deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_drafts_of_the_formula(two_deep, drafts, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_drafts_of_known_models_are_those_of_whole_passes(name: str, shared: Path) -> None:
    drafter = Drafter(load_model(shared / "golden" / "mtp" / name, ahead=True), 2)
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    with torch.inference_mode():
        for request, _ in drafter.generate([Request(text[:4], 1, set())]):
            assert request.done
        hidden = drafter._read(text[:-1], arriving=True)
        assert drafter._draft(text, hidden, 2) == draft_anew(drafter, text, 2)


def crop_one_too_few(patch: pytest.MonkeyPatch) -> None:
    crop = KeyValueCache.crop
    patch.setattr(KeyValueCache, "crop", lambda cache, length: crop(cache, length + 1))


def keep_what_drafts_said(patch: pytest.MonkeyPatch) -> None:
    def forget(layer: LayerInUse, length: int) -> None:
        layer.cache.crop(length - 1)
        layer._given = [states[:, :0] for states in layer._given]

    patch.setattr(LayerInUse, "forget_drafts", forget)


@pytest.mark.parametrize("fault", [crop_one_too_few, keep_what_drafts_said])
def test_a_planted_fault_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], two_deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_drafts_of_the_formula(two_deep, 2, monkeypatch)


def make_known(make_checkpoint: Make, kept: list[int], half: int = 0) -> Path:
    """Make a model that goes round a cycle, with a layer ahead that sees some of its words.

    Args:
        kept: the words.
        half: 1 for a layer that looks at the word before, so that all drafts are wrong.
    """
    folder = make_folder(make_checkpoint, 1, num_hidden_layers=1)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1.0)
    for place, token in enumerate(CYCLE):
        tensors["model.embed_tokens.weight"][token, token] = 1.0
        tensors["lm_head.weight"][CYCLE[(place + 1) % len(CYCLE)], token] = 1.0
    width = tensors["model.norm.weight"].shape[0]
    for token in kept:
        tensors["model.layers.1.eh_proj.weight"][token, half * width + token] = 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tally_of(folder: Path, new: int, drafts: int = 0, stop: tuple[int, ...] = ()) -> tuple[int, int, int, int]:
    drafter = Drafter(load_model(folder, ahead=True), drafts)
    request = Request([CYCLE[0]], new, set(stop))
    written = [token for _, token in drafter.generate([request]) if token is not None]
    assert written == [CYCLE[place % len(CYCLE)] for place in range(1, len(written) + 1)]
    tally = drafter.tally
    return tally.steps, tally.tokens, tally.drafted, tally.accepted


def test_drafts_are_counted(make_checkpoint: Make) -> None:
    right, wrong = make_known(make_checkpoint, CYCLE), make_known(make_checkpoint, CYCLE, half=1)
    assert tally_of(right, 21) == (10, 20, 10, 10)
    assert tally_of(right, 20) == (10, 19, 9, 9)  # the last token has no room for a draft
    assert tally_of(right, 1) == (0, 0, 0, 0)
    assert tally_of(right, 21, 3) == (5, 20, 5, 5)
    assert tally_of(right, 21, stop=(CYCLE[0],)) == (3, 5, 3, 3)  # the end is drafted, too
    assert tally_of(wrong, 21) == (20, 20, 19, 0)

    # Right behind two of six: the words that follow 2 and 7.
    some = make_known(make_checkpoint, [2, 7])
    steps, tokens, drafted, accepted = tally_of(some, 1 + 4 * len(CYCLE))
    assert tokens == 24 and steps == tokens - accepted and 0 < accepted < drafted == steps - 1
    assert accepted == 4


def test_the_command_says_what_became_of_drafts(make_checkpoint: Make, run_demo: RunDemo, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", initializer_range=0.3, tie_word_embeddings=False)
    words = ("--prompt", "Why?", "--max-new-tokens", "9", "--greedy")
    error = f"error: {folder}: no layers that predict further ahead; mtp in a run's config trains some"
    assert run_demo(folder, *words, "--draft")[::2] == (2, f"{error} (see docs/troubleshooting.md)\n")
    add_layers_ahead(folder, 2)
    code, out, _ = run_demo(folder, *words)
    said = r"drafts: \d\.\d\d tokens a step, \d+% of first drafts accepted \(\d+ steps?\), [\d,.]+ tokens/s\n"
    for given in (["--draft"], ["--draft", "1"], ["--draft", "4"]):
        found = run_demo(folder, *words, *given)
        assert found[:2] == (code, out) and re.fullmatch(said, found[2]), found

    assert run_demo(folder, *words[:2], "--max-new-tokens", "1", "--draft")[2] == (
        "drafts: none, as the answers were too short\n"
    )
    source, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text('{"prompt": "Why?"}\n{"prompt": "How?"}\n', encoding="utf-8")
    files = ("--prompts-file", source, "--output", target)
    assert re.search(said, run_demo(folder, *files, *words[2:], "--draft")[2])
    assert len(target.read_text(encoding="utf-8").splitlines()) == 2
    assert run_demo(folder, *files, "--draft", "--batch-size", "2")[::2] == (
        2,
        "error: --batch-size: --draft answers one prompt after the other; expected one of them (see docs/demo.md)\n",
    )

    hg_to_pp(folder, tmp_path / "pp")
    assert "expected the HuggingFace folder that it was made from" in run_demo(tmp_path / "pp", *words, "--draft")[2]


def test_what_cannot_draft_is_refused(make_checkpoint: Make) -> None:
    with pytest.raises(ConfigError, match=r"--draft: needs the whole model .*; expected python demo\.py"):
        open_demo(make_parser().parse_args(["--draft"]), ProcessInfo(0, 2, 0, 2))

    folder = make_folder(make_checkpoint, 1)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"rope_type: dynamic: angles .*; expected no --draft"):
        Drafter(load_model(folder, ahead=True))
    with pytest.raises(CheckpointError, match=r"drafts need a whole model; expected the merged model"):
        load_model(folder, adapter=folder, ahead=True)
