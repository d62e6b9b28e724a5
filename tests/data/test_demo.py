"""demo.py as a user runs it, on a tiny model: it prints what transformers itself generates, from either layout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.checkpoint.convert import hg_to_pp
from tests.conftest import ROOT

QUESTIONS = ["What is Pipetune?", "怎样开始训练？"]


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama")


@pytest.fixture(scope="module")
def pipeline_folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "model"
    hg_to_pp(checkpoint, folder)
    return folder


def demo(*words: str | Path, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "demo.py", *map(str, words), "--greedy", "--max-new-tokens", "5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, input=typed, capture_output=True, encoding="utf-8", timeout=120, check=False
    )


def expected_answers(folder: Path, questions: list[str]) -> list[str]:
    """What transformers generates greedily, turn after turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        ids = model.generate(prompt, max_new_tokens=5, do_sample=False)[0, prompt.shape[1] :]
        messages.append({"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)})
    return [message["content"] for message in messages[1::2]]


def test_a_prompt_is_answered_as_transformers_answers_it(checkpoint: Path) -> None:
    done = demo("--model", checkpoint, "--prompt", QUESTIONS[0])
    assert (done.returncode, done.stdout) == (0, expected_answers(checkpoint, QUESTIONS[:1])[0] + "\n")
    assert len(done.stdout) > 1


def test_the_pipeline_layout_answers_the_same(checkpoint: Path, pipeline_folder: Path) -> None:
    done = demo("--model", pipeline_folder, "--prompt", QUESTIONS[0])
    assert (done.returncode, done.stdout) == (0, expected_answers(checkpoint, QUESTIONS[:1])[0] + "\n")


@pytest.mark.parametrize("ending", ["\n", ""])
def test_a_chat_remembers_its_turns_and_ends_with_an_empty_line_or_the_input(checkpoint: Path, ending: str) -> None:
    done = demo("--model", checkpoint, typed="\n".join(QUESTIONS) + "\n" + ending)
    first, second = expected_answers(checkpoint, QUESTIONS)
    end = "" if ending else "\n"
    assert done.stdout == f"An empty line ends the chat.\n> {first}\n> {second}\n> {end}"
    assert done.returncode == 0


def test_a_missing_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    done = demo("--model", tmp_path / "none", "--prompt", "Hello")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'none'}: ")


def test_a_model_without_a_tokenizer_is_refused_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    done = demo("--model", tmp_path, "--prompt", "Hello")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}: no usable tokenizer")
