"""Shows that generation with the cache writes what full forwards and transformers write, alone and beside others.

Sampling keeps to what is asked, and to its seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from models import CausalLM, load_model
from models.attention.cache import KeyValueCache
from models.errors import CheckpointError
from options.demo.generation import Request, Sampling, choose, generate, generate_many
from tests.cases import tiered
from tests.conftest import ORIGINALS
from tests.models.cases import CASES
from tests.models.helpers import oracle, random_ids
from tests.models.test_scores import save_scoring

NEW = 24  # more than the windows
NAMES = [name for name in CASES if not name.endswith(("tied", "projected"))]
ALIKE = ["baichuan*", "*window*", "opt", "phi3*", "glm4", "olmo2", "*dynamic", "*32k", "gemma3", "*some-dense"]
DYNAMIC = ("llama-dynamic", "internlm2-dynamic")
TURNING = ("phi3-long", *DYNAMIC)  # a text that grows past some length has other angles from its first token on
PROMPT = random_ids(1, 12)[0].tolist()
WIDE = {"initializer_range": 0.3, "tie_word_embeddings": False}  # so that a model does not repeat itself


@pytest.fixture(scope="module")
def llama(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama", **WIDE)


def greedy_without_cache(model: CausalLM) -> list[int]:
    ids = list(PROMPT)
    for _ in range(NEW):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("name", tiered(NAMES, slow=ALIKE))
def test_greedy_with_cache_equals_full_forwards_and_transformers(name: str, make_case: Callable[..., Path]) -> None:
    folder = make_case(name, **WIDE)
    model = load_model(folder)
    written = list(generate(model, PROMPT, NEW, stop=set()))
    assert len(set(written)) > NEW // 2, "too monotonous to show anything"
    if name not in DYNAMIC:  # whose cache holds keys of smaller angles, as it does in transformers
        assert written == greedy_without_cache(model)
    if CASES[name].model_type not in ORIGINALS:
        greedy = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": -1, "pad_token_id": 0}
        cached = name != "phi3-long"  # where transformers before 5.23 forgets what it dropped of its cache
        theirs = oracle(folder).generate(torch.tensor([PROMPT]), use_cache=cached, **greedy)
        assert written == theirs[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("name", [case for case in tiered(NAMES, slow=ALIKE) if case.id not in TURNING])
def test_logits_with_cache_equal_those_without(name: str, make_case: Callable[..., Path]) -> None:
    model = load_model(make_case(name))
    ids = random_ids(1, 36)
    cache = KeyValueCache()
    with torch.inference_mode():
        pieces = [model(piece, cache=cache) for piece in ids.split([12, 1, 1, 1, 1, 5, 1, 1, 10, 1, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids), atol=1e-5, rtol=0)


def test_generation_stops_before_a_stop_id(llama: Path) -> None:
    model = load_model(llama)
    written = list(generate(model, PROMPT, NEW, stop=set()))
    first = written.index(written[7])
    assert list(generate(model, PROMPT, NEW, stop={written[7], 511})) == written[:first]
    assert list(generate(model, PROMPT, 5, stop=set())) == written[:5]


@pytest.mark.parametrize("name", tiered(NAMES, slow=ALIKE))
def test_prompts_at_once_get_the_answers_that_they_get_alone(name: str, make_case: Callable[..., Path]) -> None:
    model = load_model(make_case(name, **WIDE))
    prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (5, 30, 12, 1, 20, 40)]
    lengths = [24, 3, 40, 30, 1, 12]  # one ends while others are under way, and some cross the length of a turn
    asked = [Request(prompt, length, set()) for prompt, length in zip(prompts, lengths, strict=True)]
    written: dict[Request, list[int]] = {request: [] for request in asked}
    for request, token in generate_many(model, iter(asked), rows=3):
        assert token is not None
        written[request].append(token)
    alone = [list(generate(model, prompt, length, set())) for prompt, length in zip(prompts, lengths, strict=True)]
    assert list(written.values()) == alone
    assert [request.text for request in asked] == [[*prompt, *new] for prompt, new in zip(prompts, alone, strict=True)]


def test_a_request_can_be_ended_by_whoever_reads_it(llama: Path) -> None:
    model = load_model(llama)
    asked = [Request(PROMPT, NEW, set()), Request(PROMPT[:5], NEW, set())]
    for request, _ in generate_many(model, asked):
        request.done = request.done or (request is asked[0] and len(request.text) == len(PROMPT) + 3)
    assert [len(request.text) for request in asked] == [len(PROMPT) + 3, 5 + NEW]


def test_sampling_follows_the_seed_and_not_the_neighbours(llama: Path) -> None:
    model = load_model(llama)

    def sample(seed: int | None, *prompts: list[int]) -> list[int]:
        asked = [Request(prompt, NEW, set(), Sampling(1.0, 0.95, seed=seed)) for prompt in prompts]
        for _ in generate_many(model, asked):
            pass
        return asked[0].text[len(PROMPT) :]

    alone = sample(0, PROMPT)
    assert alone == sample(0, PROMPT, PROMPT[:4], PROMPT[2:])
    assert alone != sample(1, PROMPT)
    drawn = []
    for seed in (0, 0, 1):  # of torch's common random numbers
        torch.manual_seed(seed)
        drawn.append(sample(None, PROMPT))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.8, 0.9), (1.0, 1.0), (3.0, 0.6), (0.2, 0.3), (1.0, 0.0)])
def test_sampling_reaches_what_transformers_leaves_and_nothing_else(
    penalty: float, top_k: int | None, temperature: float, top_p: float
) -> None:
    numbers = torch.Generator().manual_seed(3)
    logits, text = torch.randn(12, generator=numbers), [1, 4, 4, 9]
    steps = [
        RepetitionPenaltyLogitsProcessor(penalty),
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(top_k or len(logits)),
        TopPLogitsWarper(top_p),
    ]
    scores = logits[None]
    for step in steps:
        scores = step(torch.tensor([text]), scores)
    expected = set(torch.nonzero(scores[0].isfinite()).flatten().tolist())
    sampling = Sampling(temperature, top_p, top_k, penalty, seed=0)
    generator = sampling.generator(logits.device)
    assert {choose(logits, sampling, text, generator) for _ in range(3000)} == expected
    likeliest = choose(logits, replace(sampling, temperature=0.0), text)
    assert likeliest == int(scores[0].argmax())
    assert choose(logits, replace(sampling, temperature=1e-45), text, generator) == likeliest


def test_nothing_is_written_by_a_model_that_scores(tmp_path: Path) -> None:
    folder = save_scoring(tmp_path / "model", "llama", 2)
    refused = r"scores texts \(LABEL_0, LABEL_1\) and writes none; expected a language model"
    with pytest.raises(CheckpointError, match=refused):
        list(generate(load_model(folder), [3, 4], 2, set()))
