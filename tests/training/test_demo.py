"""demo.py on tiny models: it prints what transformers itself generates, and stops where a family's answer ends."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import demo
from data.chat.native.kinds import export_tokenizer
from data.tokenized.tokenize import load_tokenizer
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from models.generation import GREEDY
from tests.conftest import save_original
from tests.launching import run
from tests.training.reciting import make_recite
from training.demo.chat import Chat
from training.demo.command_line import HELP
from training.demo.speaker import Speaker, Wishes

QUESTIONS = ["What is Pipetune?", "怎样开始训练？"]

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Make) -> Path:
    return make_checkpoint("llama")


@pytest.fixture(scope="module")
def pipeline_folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "model"
    hg_to_pp(checkpoint, folder)
    return folder


def start_demo(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """demo.py as a user starts it."""
    options = ("--greedy", "--max-new-tokens", "5")
    return run(sys.executable, "demo.py", *words, *options, PYTHONIOENCODING="utf-8")


def run_demo(monkeypatch: pytest.MonkeyPatch, *words: str | Path, typed: str = "") -> int:
    """demo.py in this process, which is sooner there; gives the exit code."""
    command = ["demo.py", *map(str, words), "--greedy", "--max-new-tokens", "5"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    try:
        demo.main()
    except SystemExit as left:
        assert isinstance(left.code, int)
        return left.code
    return 0


def expected_answers(folder: Path, questions: list[str]) -> list[str]:
    """What transformers generates greedily, turn after turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        ids = model.generate(prompt, max_new_tokens=5, do_sample=False)[0, prompt.shape[1] :]
        content = tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")  # of a character that was cut
        messages.append({"role": "assistant", "content": content})
    return [message["content"] for message in messages[1::2]]


def test_a_prompt_is_answered_as_transformers_answers_it(checkpoint: Path) -> None:
    done = start_demo("--model", checkpoint, "--prompt", QUESTIONS[0])
    assert (done.returncode, done.stdout) == (0, expected_answers(checkpoint, QUESTIONS[:1])[0] + "\n")
    assert len(done.stdout) > 1


def test_the_pipeline_layout_answers_the_same(
    checkpoint: Path, pipeline_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(monkeypatch, "--model", pipeline_folder, "--prompt", QUESTIONS[0]) == 0
    assert capsys.readouterr().out == expected_answers(checkpoint, QUESTIONS[:1])[0] + "\n"


@pytest.mark.parametrize("ending", ["\n", ""])
def test_a_chat_remembers_its_turns_and_ends_with_an_empty_line_or_the_input(
    checkpoint: Path, ending: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(monkeypatch, "--model", checkpoint, typed="\n".join(QUESTIONS) + "\n" + ending) == 0
    first, second = expected_answers(checkpoint, QUESTIONS)
    end = "" if ending else "\n"
    assert capsys.readouterr().out == f"{HELP}\n> {first}\n> {second}\n> {end}"


def test_a_missing_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    done = start_demo("--model", tmp_path / "none", "--prompt", "Hello")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'none'}: ")


def test_a_model_without_a_tokenizer_is_refused_in_one_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    assert run_demo(monkeypatch, "--model", tmp_path, "--prompt", "Hello") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}: no usable tokenizer")


ASSISTANT, STOPS = 64796, {"</s>": 2, "<|user|>": 64795, "<|observation|>": 64797}
ANSWER = "Three layers, 三层"


@pytest.fixture
def reciter(shared: Path, tmp_path: Path) -> Callable[[int], Path]:
    """A function that writes a ChatGLM3 which answers anything with a new line, ANSWER, a stop token and more.

    Its one block adds nothing, so that every token says which one follows: each has a direction of its own.
    """

    def write(stop: int) -> Path:
        folder = tmp_path / "chatglm3"
        folder.mkdir()
        shutil.copy(shared / "golden" / "tokenizers" / "chatglm3" / "tokenizer.model", folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ChatGLMTokenizer"}))
        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "kv_channels": 8,
            "num_attention_heads": 2,
            "multi_query_group_num": 1,
        }
        sizes |= {"ffn_hidden_size": 8, "num_layers": 1, "padded_vocab_size": 65_024}
        save_original(folder, "chatglm", {}, initializer_range=0.0, **sizes)
        tokenizer = load_tokenizer(folder)
        written = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("\n", ANSWER, "and more")]
        ids = [ASSISTANT, *written[0], *written[1], stop, *written[2]]
        make_recite(folder, ids, "transformer.embedding.word_embeddings", "transformer.output_layer")
        return folder

    return write


def assert_recites(folder: Path) -> None:
    chat = Chat(Speaker(folder), Wishes(32, GREEDY), print)
    for turn, question in enumerate(QUESTIONS):
        pieces = list(chat.ask(question))
        assert "".join(pieces) == ANSWER
        assert chat.said[2 * turn + 1].text == ANSWER


@pytest.mark.parametrize("stop", STOPS)
def test_chatglm3_begins_without_its_new_line_and_stops_where_it_hands_over(
    stop: str, reciter: Callable[[int], Path]
) -> None:
    assert_recites(reciter(STOPS[stop]))


def test_a_native_export_stops_there_too(reciter: Callable[[int], Path], tmp_path: Path) -> None:
    hg_to_pp(reciter(STOPS["<|user|>"]), tmp_path / "layers")
    native = ExportOptions(layout="native", add_tokenizer=export_tokenizer)
    pp_to_hg(tmp_path / "layers", tmp_path / "native", options=native)
    assert_recites(tmp_path / "native")


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    """The one line with which the demo leaves."""
    assert run_demo(monkeypatch, "--model", folder, "--prompt", "?", *words) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1
    return told


def test_a_model_whose_weights_are_nan_says_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "not finite" in refusal(monkeypatch, capsys, folder)


@pytest.mark.parametrize("damage", ["gone", "half", "empty"])
def test_weights_that_are_not_whole_are_named(
    damage: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if damage != "gone":
        weights.write_bytes(content[: len(content) // 2 if damage == "half" else 0])
    assert str(folder) in refusal(monkeypatch, capsys, folder)


@pytest.mark.parametrize(
    "content", ["{", "[2]", '{"eos_token_id": "2"}', '{"eos_token_id": [2, {}]}', "\0", "[" * 10**5]
)
def test_a_damaged_generation_config_is_named(
    content: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "generation_config.json").write_text(content, encoding="utf-8")
    assert "generation_config.json: damaged" in refusal(monkeypatch, capsys, folder)


def test_a_tokenizer_of_another_model_is_told(
    make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = make_checkpoint("llama", vocab_size=40)
    capsys.readouterr()
    assert "vocab_size" in refusal(monkeypatch, capsys, small)


def test_an_answer_cannot_act_on_the_terminal(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    settings = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = settings["model"]["vocab"]
    escape = vocabulary["\u011b"]  # as a byte-level vocabulary writes the escape character
    vocabulary["<unk>"], vocabulary["\u011b"] = escape, 0
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["id"] != 0]
    (folder / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(0)  # all tokens are equally likely: the first is taken
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert run_demo(monkeypatch, "--model", folder, "--prompt", "?", "--prompt-format", "plain") == 0
    assert capsys.readouterr().out == "\\x1b" * 5 + "\n"
