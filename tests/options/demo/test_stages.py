"""A model in several processes writes what it writes in one, and all end together when one cannot go on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from models import CausalLM, load_model
from models.api import read_spec
from models.conversion.to_pipeline import hg_to_pp
from options.demo.generation import ROWS, Passes, Request, generate_many
from options.demo.stages import divide_by_weights, in_replica, shares_of, stage_of
from tests.conftest import FAQ
from tests.launching import (
    DEEPSPEED,
    Launch,
    deepspeed,
    error_lines,
    run,
    start_deepspeed,
    supervised,
    topology,
    torchrun,
    write_config,
)
from tests.models.cases import CASES
from tests.models.helpers import random_ids
from tests.options.demo.conftest import WIDE, Make, RunDemo
from tests.ranks import Ranks
from tests.training.test_chaos import ranks_of
from tests.workers.generation import requests_of
from training.distributed.failure_detector import DIED
from training.distributed.processes import ProcessInfo
from training.errors import ConfigError
from training.launch.agent import free_port

STAGED = {"phi3-long": (2,), "bloom": (2, 4), "mixtral": (2, 4), "llama-dynamic": (4,), "mistral-window": (4,)}
SLOW = ["phi3-long-2", "bloom-2x2", "mixtral-2x2"]
TIERS: dict[str, Any] = dict.fromkeys(SLOW, pytest.mark.slow)
UNDER_TEST = [
    pytest.param(name, stages, 1, id=f"{name}-{stages}", marks=TIERS.get(f"{name}-{stages}", pytest.mark.longest))
    for name, sizes in STAGED.items()
    for stages in sizes
] + [
    pytest.param(name, 2, 2, id=f"{name}-2x2", marks=TIERS.get(f"{name}-2x2", pytest.mark.longest))
    for name in ("bloom", "mixtral", "llama-dynamic")
]
# Family, layers per stage or stages, processes to a stage, replicas.
REPLICAS = [
    pytest.param("llama-dynamic", [1, 4], 1, 2, id="uneven-2"),
    pytest.param("bloom", [1], 1, 3, id="whole-3", marks=pytest.mark.longest),
    pytest.param("mixtral", [2], 2, 2, id="2x2-2", marks=pytest.mark.longest),
    pytest.param("phi3-long", [2, 1, 2], 1, 1, id="uneven-1", marks=pytest.mark.longest),
]
LAUNCHERS_OWN = r"\[20\d\d-.*\n"  # what DeepSpeed's launcher prints beside the chat
PROMPTS = ["Why? " * times for times in (1, 7, 2, 12, 3, 1, 5)]

Launcher = Callable[..., subprocess.CompletedProcess[str]]


def described(stop: list[int]) -> list[Any]:
    """Requests of different lengths, greedy and sampled; some cross the length at which longrope turns."""
    lengths = [(5, 24), (30, 3), (12, 40), (1, 30), (20, 1), (40, 12), (3, 9), (28, 8)]
    return [
        [random_ids(1, length, seed=length)[0].tolist(), most, stop, 0.8 * (number % 2), number]
        for number, (length, most) in enumerate(lengths)
    ]


def written(model: Any, requests: list[Request], rows: int) -> list[list[int]]:
    for _ in generate_many(model, iter(requests), rows):
        pass
    return [request.text for request in requests]


@pytest.fixture(scope="module")
def llama(make_checkpoint: Make) -> CausalLM:
    return load_model(make_checkpoint("llama", **WIDE))


@pytest.fixture(scope="module")
def turning(make_checkpoint: Make) -> CausalLM:
    model_type, changes = CASES["phi3-long"]
    return load_model(make_checkpoint(model_type, **changes | WIDE))


@pytest.mark.parametrize(("groups", "rows"), [(2, 3), (3, 8), (5, 4)])
def test_groups_of_rows_write_what_one_group_writes(groups: int, rows: int, turning: CausalLM) -> None:
    stop = written(turning, requests_of(described([])), 8)[2][20]  # an answer of many tokens ends early
    expected = written(turning, requests_of(described([stop])), 4)
    assert len(expected[2]) <= 20
    assert written(Passes(turning, groups), requests_of(described([stop])), rows) == expected


class Noted(Passes):
    """Notes which groups have something to compute, and for how many rows, whenever logits are waited for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.under_way: list[tuple[int, int]] = []

    def take(self) -> torch.Tensor:
        groups, rows = {work.group for work in self._queue}, sum(len(work.texts) for work in self._queue)
        self.under_way.append((len(groups), rows))
        return super().take()


@pytest.mark.parametrize(("asked", "rows"), [(3, None), (12, 7), (40, None)])
def test_all_groups_have_work_as_long_as_requests_wait(asked: int, rows: int | None, llama: CausalLM) -> None:
    passes = Noted(llama, 3)
    until: list[int] = []  # how often logits were waited for when the last request was taken

    def requests() -> Iterator[Request]:
        for number in range(asked):
            yield Request([7, number + 3], 4 + number % 3, set())
        until.append(len(passes.under_way))

    for _ in generate_many(passes, requests(), rows):
        pass
    assert {groups for groups, _ in passes.under_way[: until[0] + 1]} == {3}
    assert max(rows for _, rows in passes.under_way) == min(asked, rows or 3 * ROWS)


def test_a_division_makes_the_largest_stage_as_small_as_can_be(make_checkpoint: Make) -> None:
    spec = read_spec(make_checkpoint("llama", num_hidden_layers=5, vocab_size=2000))
    weights = [sum(shape.numel() for shape in spec.shapes(layer).values()) for layer in range(spec.n_layers)]

    def largest(bounds: list[int]) -> int:
        return max(sum(weights[begin:end]) for begin, end in pairwise(bounds))

    for stages in range(2, spec.n_layers + 1):
        cuts = combinations(range(1, spec.n_layers), stages - 1)
        best = min(largest([0, *between, spec.n_layers]) for between in cuts)
        assert largest([0, *accumulate(divide_by_weights(spec, stages))]) == best
    with pytest.raises(ConfigError, match="8 stages for a model of 7 layers"):
        divide_by_weights(spec, 8)


@pytest.mark.parametrize(
    ("asked", "shares", "stages"), [(None, 1, [3, 2, 1, 0]), (2, 2, [1, 1, 0, 0]), (4, 4, [0] * 4), (0, 4, [0] * 4)]
)
def test_ranks_that_share_a_stage_follow_each_other(asked: int | None, shares: int, stages: list[int]) -> None:
    """So that they are on one host, and the last stage is rank 0's."""
    places = [ProcessInfo(rank, 4, rank, 4) for rank in range(4)]
    assert {shares_of(asked, place) for place in places} == {shares}
    assert [stage_of(place, shares) for place in places] == stages
    with pytest.raises(ConfigError, match="--tensor-parallel: expected a divisor of 4, the processes; found 3"):
        shares_of(3, places[0])


def test_processes_beyond_the_stages_are_replicas() -> None:
    places = [ProcessInfo(rank, 4, rank, 4) for rank in range(4)]

    def found(shares: int, parts: list[int] | None) -> list[tuple[int, int]]:
        inside = [in_replica(place, shares, parts) for place in places]
        return [(own.rank, stage_of(own, shares)) for own in inside]

    assert found(1, None) == [(0, 3), (1, 2), (2, 1), (3, 0)]
    assert found(1, [2]) == found(1, [4, 1]) == [(0, 1), (1, 0), (0, 1), (1, 0)]
    assert found(2, [1]) == [(0, 0), (1, 0), (0, 0), (1, 0)]
    with pytest.raises(ConfigError, match=r"--parts: expected a multiple of 6 processes \(3 stages of 2\), found 4"):
        found(2, [1, 2, 2])


@pytest.mark.launched
@pytest.mark.parametrize(("name", "stages", "shares"), UNDER_TEST)
def test_stages_write_what_one_process_writes(
    name: str, stages: int, shares: int, ranks: Ranks, make_checkpoint: Make, tmp_path: Path
) -> None:
    model_type, changes = CASES[name]
    folder = make_checkpoint(model_type, **changes | WIDE | {"tie_word_embeddings": name in ("bloom", "phi3-long")})
    if stages == 4:
        folder = tmp_path / "layers"
        hg_to_pp(make_checkpoint(model_type, **changes | WIDE), folder)
    compare(folder, stages * shares, shares, None, ranks, tmp_path)


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize(("name", "parts", "shares", "replicas"), REPLICAS)
def test_replicas_of_given_parts_write_what_one_process_writes(
    name: str,
    parts: list[int],
    shares: int,
    replicas: int,
    ranks: Ranks,
    make_checkpoint: Make,
    tmp_path: Path,
) -> None:
    model_type, changes = CASES[name]
    stages = len(parts) if len(parts) > 1 else parts[0]
    compare(make_checkpoint(model_type, **changes | WIDE), stages * shares * replicas, shares, parts, ranks, tmp_path)


def compare(folder: Path, processes: int, shares: int, parts: list[int] | None, ranks: Ranks, tmp_path: Path) -> None:
    """Several processes write what one does, with few rows and many."""
    keys = {"data_path": "none", "save_path": "none", "train_batch_size": 1, "model_topo": topology((processes, 1))}
    cases: list[dict[str, Any]] = [
        {
            "name": f"{rows}-{len(stop)}",
            "config": keys | {"model_path": str(folder)},
            "shares": shares,
            "parts": parts,
            "rows": rows,
            "requests": described(stop),
        }
        for rows, stop in ((1, []), (5, []), (8, [7, 40, 41, 42]))
    ]
    ranks.run(processes, "generation", cases, tmp_path)
    model = load_model(folder)
    for case in cases:
        expected = written(model, requests_of(case["requests"]), case["rows"])
        assert json.loads((tmp_path / f"{case['name']}.json").read_text()) == expected


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, with a checkpoint of uneven stages."""
    path = tmp_path_factory.mktemp("trained") / "run.yml"
    keys = {"model_topo": topology((2, 1), [1, 4]), "max_steps": 1}
    write_config(path, model_path=str(folder), data_path=str(FAQ), **keys)
    done = supervised(2, "train_ds.py", "--config", path)
    assert done.returncode == 0, done.stdout + done.stderr
    return path.with_suffix("")


def prompts_in(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts), encoding="utf-8")
    return path


def typing(path: Path, text: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A command that reads what is typed."""
    path.write_text(text, encoding="utf-8")
    return run("bash", "-c", '"$@" < "$0"', path, *words)


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "processes", "how"),
    [
        pytest.param(deepspeed, 2, (), marks=pytest.mark.longest),
        (torchrun, 2, ("--tensor-parallel",)),
        pytest.param(deepspeed, 4, ("--tensor-parallel", "2"), marks=pytest.mark.longest),
        pytest.param(torchrun, 4, ("--parts", "4", "1"), marks=pytest.mark.longest),
    ],
    ids=["stages", "shares", "both", "replicas"],
)
def test_the_demo_answers_a_file_from_a_runs_checkpoint(
    launcher: Launcher, processes: int, how: tuple[str, ...], trained: Path, tmp_path: Path, run_demo: RunDemo
) -> None:
    """Drawn tokens too, as rank 0 alone draws; a text that ends in the middle of a pass leaves the others in step."""
    source = prompts_in(tmp_path / "prompts.jsonl", PROMPTS)
    drawn = ("--temperature", "0.9", "--seed", "3", "--stop", "e", "--max-new-tokens", "12")
    words = ("--prompts-file", source, "--batch-size", "3", *drawn)
    target = tmp_path / "together.jsonl"
    done = launcher(processes, "demo.py", "--model", trained, *how, *words, "--output", target)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("together.jsonl: 7 answers") == 1
    division = {"--parts": "stages: 2, of [4, 1] layers; replicas: 2", "--tensor-parallel": "replicas: 1"}
    assert division.get(how[0] if how else "", "stages: 2, of [") in done.stderr
    assert run_demo(trained, *words, "--output", tmp_path / "alone.jsonl")[0] == 0
    assert target.read_bytes() == (tmp_path / "alone.jsonl").read_bytes()


@pytest.mark.launched
@pytest.mark.longest
def test_a_chat_in_four_stages(folder: Path, tmp_path: Path, run_demo: RunDemo) -> None:
    words = ("--greedy", "--max-new-tokens", "8")
    launcher = (*DEEPSPEED, "--num_gpus", "4", "--num_nodes", "1")
    typed = "Why?\n/nothing\nAnd then?\n/reset\nWhy?\n/save {}\n\n"
    saved = [tmp_path / "staged.jsonl", tmp_path / "alone.jsonl"]
    port = ("--master_port", str(free_port()))
    done = typing(tmp_path / "typed", typed.format(saved[0]), *launcher, *port, "demo.py", "--model", folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    _, alone, _ = run_demo(folder, *words, typed=typed.format(saved[1]))
    assert re.sub(LAUNCHERS_OWN, "", done.stdout) == alone
    assert done.stderr.count("/nothing: expected /reset or /save FILE") == 1
    assert saved[0].read_bytes() == saved[1].read_bytes()


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = error_lines(done)
    return line


@pytest.mark.launched
@pytest.mark.longest
def test_bad_input_is_one_line(folder: Path, trained: Path, tmp_path: Path) -> None:
    question = ("--prompt", "Why?", "--greedy")
    message = refusal(deepspeed(6, "demo.py", "--model", folder, *question))
    assert "6 stages for a model of 5 layers" in message
    half = shutil.copytree(trained, tmp_path / "run")
    (checkpoint,) = half.glob("step-*")
    (checkpoint / "layer_01-model_states.pt").write_bytes(b"PK")
    assert "layer_01-model_states.pt" in refusal(deepspeed(2, "demo.py", "--model", half, *question))
    parts = ("--prompts-file", prompts_in(tmp_path / "few.jsonl", PROMPTS), "--output", tmp_path / "few.out")
    message = refusal(deepspeed(2, "demo.py", "--model", folder, "--parts", "2", "2", *parts))
    assert "--parts: [2, 2] sums to 4, but the model has 5 layers (3 blocks + embedding + head)" in message
    assert "--parts: 2 replicas answer a file of prompts together; expected --prompts-file, or 1 process" in refusal(
        deepspeed(2, "demo.py", "--model", folder, "--parts", "1", *question)
    )
    assert "num_key_value_heads" in refusal(deepspeed(3, "demo.py", "--tensor-parallel", "--model", folder, *question))
    source = prompts_in(tmp_path / "prompts.jsonl", [*PROMPTS, "Why? " * 500])
    words = ("--model", folder, "--prompts-file", source, "--output", tmp_path / "out.jsonl")
    assert refusal(deepspeed(2, "demo.py", *words)).startswith(f"error: {source}: line 8: ")


@pytest.fixture
def busy(folder: Path, tmp_path: Path) -> Iterator[Launch]:
    """Two processes in the middle of their answers."""
    source = prompts_in(tmp_path / "prompts.jsonl", PROMPTS * 500)
    words = ("--prompts-file", source, "--output", tmp_path / "out.jsonl", "--max-new-tokens", "100")
    launch = start_deepspeed(2, "demo.py", "--model", folder, *words)
    launch.until(lambda: (tmp_path / "out.jsonl").exists() and (tmp_path / "out.jsonl").stat().st_size)
    yield launch
    launch.kill()


@pytest.mark.launched
@pytest.mark.longest
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_in_one_line(rank: int, busy: Launch) -> None:
    ranks_of(busy)[rank].kill()
    assert f"rank {rank} (stage {1 - rank}, " in (line := refusal(busy.end()))
    assert "died without an error" in line


@pytest.mark.launched
@pytest.mark.longest
def test_ctrl_c_ends_all_in_one_line(busy: Launch) -> None:
    family = busy.family()
    os.killpg(busy.pid, signal.SIGINT)
    psutil.wait_procs(family)
    assert error_lines(busy.end()) in (["error: interrupted"], ["error: the launcher is gone"])  # which was sooner


@pytest.mark.launched
@pytest.mark.longest
def test_a_launcher_that_is_told_to_end_ends_all_in_one_line(busy: Launch) -> None:
    family = busy.family()
    family[1].send_signal(signal.SIGTERM)
    psutil.wait_procs(family)
    (line,) = error_lines(busy.end())
    assert line.startswith("error: rank 0 (stage 1, ")
    assert line.endswith(": interrupted") or DIED in line  # the launcher kills a rank that is slow to say so
