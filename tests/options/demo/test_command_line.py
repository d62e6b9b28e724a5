"""The options of demo.py have their effect, prompts are those of the training, and bad options are refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from common.terminal import safe_text
from data.tokenized.tokenize import encode
from data.tokenized.tokenizer import load_tokenizer
from models import CausalLM
from models.conversion.to_pipeline import hg_to_pp
from options.demo.chat_model import ChatModel
from options.demo.generation import Request
from tests.options.demo.conftest import RunDemo

SHORT = ("--max-new-tokens", "6")


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts that a model is asked with."""
    found: list[list[int]] = []
    request = ChatModel.request

    def noting(model: ChatModel, prompt: list[int], *given: Any) -> Request:
        found.append(prompt)
        return request(model, prompt, *given)

    monkeypatch.setattr(ChatModel, "request", noting)
    return found


def test_options_decide_how_tokens_are_chosen(folder: Path, run_demo: RunDemo) -> None:
    def answer(*words: str) -> str:
        code, out, _ = run_demo(folder, "--prompt", "Why?", *SHORT, *words)
        assert code == 0
        return out

    plain = answer("--greedy")
    assert plain == answer("--temperature", "0") == answer("--top-k", "1")
    assert answer("--seed", "1") == answer("--seed", "1") != answer("--seed", "2")
    assert answer("--greedy", "--system", "Be brief.") != plain
    assert answer("--greedy", "--repetition-penalty", "0.01") != plain
    stop = plain.strip()[-2:]
    assert "\\" not in stop and answer("--greedy", "--stop", stop) == plain[: plain.index(stop)] + "\n"


def test_dtype_and_threads_are_obeyed(folder: Path, run_demo: RunDemo, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    dtypes: list[torch.dtype] = []
    write = ChatModel.write

    def noting(model: ChatModel, *given: Any) -> Any:
        dtypes.append(next(cast(CausalLM, model.model).parameters()).dtype)
        return write(model, *given)

    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(ChatModel, "write", noting)
    assert run_demo(folder, "--prompt", "Why?", "--dtype", "bf16", "--threads", "3", *SHORT)[0] == 0
    assert (threads, dtypes) == ([3], [torch.bfloat16])


@pytest.mark.parametrize("prompt_format", ["plain", "chat_template"])
def test_an_input_is_part_of_the_prompt_as_in_training(
    prompt_format: str,
    folder: Path,
    run_demo: RunDemo,
    asked: list[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    record = {"type": "instruct", "instruct": "Translate.", "input": "你好 🤗", "output": "Hello!"}
    sample = encode(record, tokenizer, 1000, prompt_format)
    trained = sample["input_ids"][: next(place for place, label in enumerate(sample["labels"]) if label != -100)]
    assert ("### Input:\n你好 🤗" in tokenizer.decode(trained)) == (prompt_format == "plain")
    words = ("--prompt-format", prompt_format, "--greedy", *SHORT)
    code, out, _ = run_demo(folder, "--prompt", "Translate.", "--input", "你好 🤗", *words)
    source, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = '{"prompt": "Translate.", "input": "你好 🤗"}\n{"prompt": "Why?", "input": null}\n'
    source.write_text(lines, encoding="utf-8")
    assert run_demo(folder, "--prompts-file", source, "--output", target, "--batch-size", "3", *words) == (
        code,
        "",
        f"{target}: 2 answers\n",
    )
    assert asked[:2] == [trained, trained]
    answers = [json.loads(line)["answer"] for line in target.read_text(encoding="utf-8").splitlines()]
    assert [safe_text(answer) + "\n" for answer in answers] == [out, run_demo(folder, "--prompt", "Why?", *words)[1]]


def test_a_text_is_continued_as_it_was_trained(
    folder: Path, run_demo: RunDemo, asked: list[list[int]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    text = "Pipetune trains 模型"
    trained = encode({"type": "pretrain", "text": text}, tokenizer, 1000)["input_ids"]
    assert trained[-1] == tokenizer.eos_token_id
    words = ("--raw", "--greedy", *SHORT)
    code, out, _ = run_demo(folder, "--prompt", text, *words)
    source, target = tmp_path / "texts.jsonl", tmp_path / "answers.jsonl"
    source.write_text(json.dumps({"prompt": text}) + "\n", encoding="utf-8")
    assert run_demo(folder, "--prompts-file", source, "--output", target, *words)[0] == code == 0
    assert asked == [trained[:-1], trained[:-1]]
    assert safe_text(json.loads(target.read_text(encoding="utf-8"))["answer"]) + "\n" == out


def test_a_model_is_asked_as_it_was_trained(
    folder: Path, run_demo: RunDemo, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, asked: list[list[int]]
) -> None:
    template = tmp_path / "mood.jinja"
    template.write_text("{{ mood }}{% for m in messages %}{{ m.content }}:{% endfor %}", encoding="utf-8")
    run = tmp_path / "run"
    hg_to_pp(folder, run / "step-1")
    (run / "step-1" / "checkpoint.json").touch()
    (run / "latest").write_text("step-1")
    config = {"prompt_format": str(template), "template_args": {"mood": "glad"}}
    (run / "run.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    words = ("--prompt", "Why?", "--greedy", *SHORT)
    for model in (run, run / "step-1"):
        assert run_demo(model, *words)[2] == (
            f"prompts as in training: prompt_format: {template}, template_args: {{'mood': 'glad'}} ({run}/run.json)\n"
        )
    sad = ("--template-args", '{"mood": "sad"}')
    run_demo(run, *words, *sad)
    run_demo(run, *words, "--prompt-format", "plain")
    assert run_demo(folder, *words, "--prompt-format", template, *sad)[2] == ""
    assert "{" not in run_demo(run, *words, "--template-args", "{}")[2]
    texts = [tokenizer.decode(prompt) for prompt in asked]
    assert texts[:3] == ["gladWhy?:", "gladWhy?:", "sadWhy?:"] and "### Instruction" in texts[3]
    assert texts[4:] == ["sadWhy?:", "Why?:"]
    template.unlink()
    assert run_demo(run, *words)[0] == 2, "with other prompts it would answer worse"
    (run / "run.json").write_text("{", encoding="utf-8")
    assert run_demo(run, *words)[::2] == (0, "")


def test_gdgpt_prompts_are_asked_as_their_records(
    folder: Path, run_demo: RunDemo, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, asked: list[list[int]]
) -> None:
    def prompt(record: dict[str, Any]) -> list[int]:
        sample = encode(record, tokenizer, 1000, "gdgpt")
        return sample["input_ids"][: next(place for place, label in enumerate(sample["labels"]) if label != -100)]

    run = tmp_path / "run"
    hg_to_pp(folder, run / "step-1")
    (run / "step-1" / "checkpoint.json").touch()
    (run / "latest").write_text("step-1")
    (run / "run.json").write_text(json.dumps({"config": {"prompt_format": "gdgpt"}}), encoding="utf-8")
    reference, tools = tmp_path / "reference.txt", tmp_path / "tools.json"
    reference.write_text("x", encoding="utf-8")
    tools.write_text('[{"name": "f"}]', encoding="utf-8")
    words = ("--prompt", "Why?", "--greedy", *SHORT)
    noted = f"prompts as in training: prompt_format: gdgpt ({run}/run.json)\n"
    kind = "question: as in records of conversation; for one of instruct give --input, which may be empty\n"
    assert run_demo(run, *words)[::2] == (0, noted + kind)
    for more in (("--input", ""), ("--input", "x"), ("--reference", reference)):
        assert run_demo(run, *words, *more)[::2] == (0, noted)
    rounds = [["ask", "Why?"], ["ans", "."]]
    instruct = {"type": "instruct", "instruct": "Why?", "output": "."}
    assert asked == [
        prompt({"type": "conversation", "rounds": rounds}),
        prompt(instruct),
        prompt(instruct | {"input": "x"}),
        prompt({"type": "ref_qa", "reference": "x", "rounds": rounds}),
    ]
    refused = "error: prompt_format: gdgpt has no place for a system message; expected none, or another prompt_format"
    assert run_demo(run, *words, "--system", "Be brief.")[::2] == (2, f"{noted}{kind}{refused} (see docs/data.md)\n")
    assert "chat template takes tools" in run_demo(run, *words, "--tools", tools)[2]
    assert run_demo(run, *words, "--raw")[::2] == (0, "")


PROMPT = ("--prompt", "Why?")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--top-p 1.5", "--top-p: expected 0.0 to 1.0, found 1.5"),
        ("--temperature nan", "--temperature: expected at least 0.0, found nan"),
        ("--temperature inf", "--temperature: expected at least 0.0, found inf"),
        ("--top-k 0", "--top-k: expected at least 1, found 0"),
        ("--seed -1", f"--seed: expected 0 to {2**63 - 1}, found -1"),
        ("--repetition-penalty 0", "--repetition-penalty: expected a number above 0, found 0.0"),
        ("--greedy --seed 0", "--seed: nothing is sampled with --greedy or --temperature 0"),
        ("--temperature 0 --top-p 0.5", "--top-p: nothing is sampled with --greedy or --temperature 0"),
        ("--raw --system Hi.", "--raw: the text stands alone; expected no --system"),
        ("--raw --template-args {}", "--raw: the text stands alone; expected no --template-args"),
        ("--prompts-file x", "--prompts-file: expected it with --output and without --prompt"),
        ("--batch-size 2", "--output and --batch-size: expected them with --prompts-file"),
        ("--prompt-format none.jinja", "none.jinja: not found; expected a Jinja file"),
        ("--template-args {", "--template-args: Invalid JSON: EOF while parsing an object at line 1 column 1"),
        ("--template-args [1]", "--template-args: expected an object"),
        ('--template-args {"tools":1}', "--template-args: expected others than tools, which Pipetune gives"),
        (
            "--tensor-parallel",
            "--tensor-parallel: without effect in one process; expected deepspeed --num_gpus N demo.py",
        ),
        ("--parts 2 3", "--parts: without effect in one process; expected deepspeed --num_gpus N demo.py"),
        ("--parts 2 0", "--parts: expected the number of stages, or the layers of each; found 0"),
    ],
)
def test_options_without_sense_are_refused_in_one_line(words: str, line: str, folder: Path, run_demo: RunDemo) -> None:
    code, out, error = run_demo(folder, *PROMPT, *words.split())
    assert (code, out) == (2, "") and re.fullmatch(rf"error: {re.escape(line)} \(see docs/\w+\.md\)\n", error)


def test_layers_of_a_script_are_no_model_to_talk_to(run_demo: RunDemo, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").touch()
    code, out, error = run_demo(tmp_path, *PROMPT)
    assert (code, out) == (2, "")
    what = "layers of a script, which have no HuggingFace layout; expected load_trained (docs/api.md)"
    assert error.startswith(f"error: {tmp_path}: {what}")


def test_options_of_a_prompt_are_refused_without_one(folder: Path, run_demo: RunDemo) -> None:
    line = "error: --input: expected it with --prompt; a line of --prompts-file has its own (see docs/demo.md)\n"
    files = ("--prompts-file", "x", "--output", "y")
    assert run_demo(folder, "--input", "?") == run_demo(folder, "--input", "?", *files) == (2, "", line)
    line = "error: --raw: continues one text; expected it with --prompt or --prompts-file (see docs/demo.md)\n"
    assert run_demo(folder, "--raw") == (2, "", line)


def test_without_a_model_the_newest_result_of_a_run_here_is_asked(
    folder: Path, run_demo: RunDemo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "base")  # of no run
    code, out, error = run_demo(None, *PROMPT, *SHORT)
    assert (code, out) == (2, "")
    assert error.startswith("error: --model: no run in this folder has a checkpoint; expected --model DIR")
    old, new = Path("runs/old"), Path("runs/new")
    hg_to_pp(folder, old / "step-1")
    shutil.copytree(folder, new / "hf")
    shutil.copytree(folder, new / ".hf.partial")
    (old / "step-1" / "checkpoint.json").touch()
    for moment, made in enumerate([old / "step-1", new / "hf", new / ".hf.partial"]):
        (made.parent / "run.json").write_text("{}")
        os.utime(made, (moment, moment))
    assert run_demo(None, *PROMPT, *SHORT)[2].startswith("model: runs/new/hf (the newest of a run here; ")
    os.utime(old / "step-1", (9, 9))
    assert run_demo(None, *PROMPT, *SHORT)[2].startswith("model: runs/old/step-1 (")
    monkeypatch.chdir(old)
    assert run_demo(None, *PROMPT, *SHORT)[2].startswith("model: step-1 (")
    Path("step-2").mkdir()
    for name in ("checkpoint.json", "adapter_config.json"):
        Path("step-2", name).write_text("{}")
    assert run_demo(None, *PROMPT, *SHORT)[2].startswith("model: step-2 (")
