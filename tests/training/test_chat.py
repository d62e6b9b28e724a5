"""A dialogue as demo.py leads it: what is asked, when an answer ends, what is forgotten, and what is refused."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import demo
from common.terminal import safe_text
from data.chat.messages import Said
from data.records.raw_records import read_file
from data.records.reading import parse
from data.tokenized.tokenize import encode, load_tokenizer
from models.conversion.to_pipeline import hg_to_pp
from models.generation import GREEDY, Request, generate_many
from tests.conftest import save_original
from tests.data.published_tokenizers import CLASSES, Published, flat
from tests.data.template_styles import STYLES
from training.demo.chat import Chat
from training.demo.command_line import converse
from training.demo.speaker import Answer, Speaker, Wishes

WISHES = Wishes(6, GREEDY)

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Ids = Callable[[list[dict[str, str]]], list[int]]  # of messages, up to where the answer to the last one begins

# By tokenizer: the model_type, and what its size asks of the model.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "chatglm3": ("chatglm", {"padded_vocab_size": 65_024}),
    "baichuan2": ("baichuan", {"vocab_size": 125_696}),
}


@pytest.fixture(scope="module")
def folder(make_checkpoint: Make) -> Path:
    return make_checkpoint("llama", initializer_range=0.3, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def speaker(folder: Path) -> Speaker:
    return Speaker(folder)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs demo.py in this process: exit code, standard output, standard error."""

    def run(*words: str, typed: tuple[str, ...] = ()) -> tuple[int, str, str]:
        lines = iter(typed)
        monkeypatch.setattr("builtins.input", lambda prompt: next(lines, ""))
        monkeypatch.setattr(sys, "argv", ["demo.py", "--model", str(folder), "--max-new-tokens", "6", *words])
        capsys.readouterr()
        code = 0
        try:
            demo.main()
        except SystemExit as left:
            assert isinstance(left.code, int)
            code = left.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts that a model is asked with."""
    found: list[list[int]] = []
    request = Speaker.request

    def noting(speaker: Speaker, prompt: list[int], *given: Any) -> Request:
        found.append(prompt)
        return request(speaker, prompt, *given)

    monkeypatch.setattr(Speaker, "request", noting)
    return found


@pytest.fixture(params=["chatml", "llama3.1", "chatglm3", "qwen", pytest.param("baichuan2", marks=pytest.mark.slow)])
def rendered(request: pytest.FixtureRequest, make_checkpoint: Make, tmp_path: Path) -> tuple[Path, Ids]:
    """A model, and the ids of a whole dialogue: as transformers renders it, or the classes that transformers lacks."""
    wide: dict[str, Any] = {"initializer_range": 0.3, "tie_word_embeddings": False}
    if request.param in PUBLISHED:
        model_type, sizes = PUBLISHED[request.param]
        published = Published(request.param, tmp_path)
        save_original(tmp_path, model_type, {}, **wide, **sizes)
        return tmp_path, lambda messages: [*flat(published.chat(messages))["input_ids"], *published.asked()]
    if request.param in CLASSES:
        published = Published(request.param, tmp_path)
        save_original(tmp_path, request.param, {}, **wide, vocab_size=len(published.tokenizer))
        return tmp_path, lambda messages: published.beginning + published.original(chatml(messages))
    folder = make_checkpoint("llama", vocab_size=560, **wide)
    if request.param in STYLES:
        STYLES[request.param].put_on(load_tokenizer(folder)).save_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    return folder, lambda messages: theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def chatml(messages: list[dict[str, str]]) -> str:
    said = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
    return said + "<|im_start|>assistant\n"


def test_twenty_turns_are_asked_as_the_whole_dialogue_is_rendered(rendered: tuple[Path, Ids]) -> None:
    folder, ids_of = rendered
    asked: list[list[int]] = []
    roomy = Speaker(folder)
    roomy.context = None
    encode = roomy.encode
    roomy.encode = lambda *given: asked.append(encode(*given)) or asked[-1]  # type: ignore[method-assign,func-returns-value]
    chat = Chat(roomy, WISHES, pytest.fail, [Said("system", "Be brief.")])
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    for turn in range(20):
        messages.append({"role": "user", "content": f"Question {turn}?"})
        answer = "".join(chat.ask(f"Question {turn}?"))
        assert asked[-1] == ids_of(messages)
        messages.append({"role": "assistant", "content": answer})
    assert len({message["content"] for message in messages[2::2]}) > 10, "too monotonous to show anything"


def showable(text: str, stop: list[str]) -> str:
    """What of an answer that goes on no stop text can take back."""
    begun = [length for each in stop for length in range(1, len(each)) if text.endswith(each[:length])]
    return text[: len(text) - max(begun, default=0)].lstrip()


@settings(max_examples=1000)
@given(st.data())
def test_an_answer_is_shown_as_it_comes_and_ends_before_a_stop_text_wherever_its_tokens_end(
    tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    text = data.draw(st.text(alphabet="abU\n 三怎🙂", max_size=12))
    stop = data.draw(st.lists(st.text(alphabet="abU\n三", min_size=1, max_size=3), max_size=2))
    answer = Answer(tokenizer, stop)
    pieces, written = [], 0
    for token in tokenizer.tokenize(text):
        pieces.append(answer.add(tokenizer.convert_tokens_to_ids(token)))
        if answer.stopped:
            break
        written += len(token)  # in bytes, which its letters stand for
        assert "".join(pieces) == showable(text.encode()[:written].decode(errors="ignore"), stop)
    pieces.append(answer.end())
    whole = [(place + len(each), place) for each in stop if (place := text.find(each)) >= 0]
    assert answer.raw == text[: min(whole)[1] if whole else None]
    assert "".join(pieces) == answer.text == answer.raw.lstrip()


def test_a_dialogue_loses_its_oldest_rounds_and_says_so(folder: Path) -> None:
    speaker, told = Speaker(folder), list[str]()
    chat = Chat(speaker, WISHES, told.append, [Said("system", "Be brief.")])
    speaker.context = 2 * len(speaker.encode([*chat.said, Said("user", "Why?")]))
    for _ in range(6):
        list(chat.ask("Why?"))
        assert len(speaker.encode(chat.said[:-1])) + WISHES.max_new_tokens <= speaker.context
        assert chat.said[0] == Said("system", "Be brief.")
    assert told and all("left out" in line for line in told)


def test_an_answer_ends_with_the_context(folder: Path) -> None:
    speaker, told = Speaker(folder), list[str]()
    prompt = speaker.encode([Said("user", "Why?")])
    speaker.context = len(prompt) + 2
    chat = Chat(speaker, WISHES, told.append)
    list(chat.ask("Why?"))
    request = speaker.request(prompt, WISHES)
    assert [len(request.text) for _ in generate_many(speaker.model, [request])][-1] == speaker.context
    assert told == [f"the context of {speaker.context} tokens has room for 2 tokens of the answer"]


def test_what_was_asked_on_the_command_line_is_what_happens(run: Run, speaker: Speaker) -> None:
    def answer(*words: str) -> str:
        code, out, _ = run("--prompt", "Why?", *words)
        assert code == 0
        return out

    plain = answer("--greedy")
    assert plain == answer("--temperature", "0") == answer("--top-k", "1")
    assert answer("--seed", "1") == answer("--seed", "1") != answer("--seed", "2")
    assert answer("--greedy", "--system", "Be brief.") != plain
    assert answer("--greedy", "--repetition-penalty", "0.01") != plain
    stop = plain.strip()[-2:]
    assert "\\" not in stop and answer("--greedy", "--stop", stop) == plain[: plain.index(stop)] + "\n"


def test_dtype_and_threads_are_torchs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    dtypes: list[Any] = []
    speaker = Speaker

    class Noting(speaker):  # type: ignore[misc,valid-type]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            dtypes.append(next(self.model.parameters()).dtype)

    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr("training.demo.speaker.Speaker", Noting)
    assert run("--prompt", "Why?", "--dtype", "bf16", "--threads", "3")[0] == 0
    assert (threads, dtypes) == ([3], [torch.bfloat16])


def test_a_chat_is_forgotten_and_saved(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    first, second = f"/save {path}", f"/save {path}"
    typed = ("/save x", "One?", "Two?", first, "/reset", "One?", second, "/what", "")
    code, out, told = run("--greedy", "--system", "Be brief.", typed=typed)
    assert code == 0
    assert told.splitlines() == [
        "error: nothing was said yet; expected a question first",
        "/what: expected /reset or /save FILE",
    ]
    long, short = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert [message["role"] for message in long] == ["system", *["user", "assistant"] * 2]
    assert short == long[:3], "after /reset the same question has the same answer"
    assert out.splitlines()[1] == long[2]["content"].splitlines()[0]
    assert all(parse(raw, None, {}).records for raw in read_file(path)), "what is saved can be trained on"


@pytest.mark.parametrize("prompt_format", ["plain", "chat_template"])
def test_an_input_is_asked_about_as_it_was_trained(
    prompt_format: str, run: Run, asked: list[list[int]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    record = {"type": "instruct", "instruct": "Translate.", "input": "你好 🤗", "output": "Hello!"}
    sample = encode(record, tokenizer, 1000, prompt_format)
    trained = sample["input_ids"][: next(place for place, label in enumerate(sample["labels"]) if label != -100)]
    assert ("### Input:\n你好 🤗" in tokenizer.decode(trained)) == (prompt_format == "plain")
    words = ("--prompt-format", prompt_format, "--greedy")
    code, out, _ = run("--prompt", "Translate.", "--input", "你好 🤗", *words)
    source, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text(
        '{"prompt": "Translate.", "input": "你好 🤗"}\n{"prompt": "Why?", "input": null}\n', encoding="utf-8"
    )
    assert run("--prompts-file", str(source), "--output", str(target), *words)[0] == code == 0
    assert asked[:2] == [trained, trained]
    answers = [json.loads(line)["answer"] for line in target.read_text(encoding="utf-8").splitlines()]
    assert [safe_text(answer) + "\n" for answer in answers] == [out, run("--prompt", "Why?", *words)[1]]


def test_a_text_goes_on_as_it_was_trained(
    run: Run, asked: list[list[int]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    text = "Pipetune trains 模型"
    trained = encode({"type": "pretrain", "text": text}, tokenizer, 1000)["input_ids"]
    assert trained[-1] == tokenizer.eos_token_id
    code, out, _ = run("--raw", "--prompt", text, "--greedy")
    source, target = tmp_path / "texts.jsonl", tmp_path / "answers.jsonl"
    source.write_text(json.dumps({"prompt": text}) + "\n", encoding="utf-8")
    assert run("--raw", "--prompts-file", str(source), "--output", str(target), "--greedy")[0] == code == 0
    assert asked == [trained[:-1], trained[:-1]]
    assert safe_text(json.loads(target.read_text(encoding="utf-8"))["answer"]) + "\n" == out


def test_a_text_goes_on_with_the_blank_that_a_decoder_drops() -> None:
    words = Tokenizer(models.WordLevel({"▁a": 0, "▁Lima": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert Answer(tokenizer, []).add(1) == "Lima"
    assert Answer(tokenizer, [], goes_on=True).add(1) == " Lima"


def test_a_file_of_prompts_is_answered(run: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text('{"prompt": "Why?"}\n', encoding="utf-8")
    words = ("--prompts-file", str(source), "--output", str(target), "--greedy", "--system", "Be brief.")
    assert run(*words, "--batch-size", "3") == (0, "", f"{target}: 1 answers\n")
    alone = run("--prompt", "Why?", "--greedy", "--system", "Be brief.")[1]
    assert safe_text(json.loads(target.read_text(encoding="utf-8"))["answer"]) + "\n" == alone


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--top-p 1.5", "--top-p: expected 0.0 to 1.0, found 1.5"),
        ("--temperature nan", "--temperature: expected at least 0.0, found nan"),
        ("--temperature inf", "--temperature: expected at least 0.0, found inf"),
        ("--top-k 0", "--top-k: expected at least 1, found 0"),
        ("--max-new-tokens 0", "--max-new-tokens: expected at least 1, found 0"),
        ("--threads 0", "--threads: expected at least 1, found 0"),
        ("--seed -1", f"--seed: expected 0 to {2**63 - 1}, found -1"),
        ("--repetition-penalty 0", "--repetition-penalty: expected a number above 0, found 0.0"),
        ("--greedy --seed 0", "--seed: nothing is drawn; expected it without --greedy and --temperature 0"),
        ("--temperature 0 --top-p 0.5", "--top-p: nothing is drawn; expected it without --greedy and --temperature 0"),
        ("--raw --system Hi.", "--raw: nothing stands around the text; expected it without --system"),
        ("--raw --input ?", "--raw: nothing stands around the text; expected it without --input"),
        ("--raw --prompt-format plain", "--raw: nothing stands around the text; expected it without --prompt-format"),
        ("--prompts-file x", "--prompts-file: expected it with --output and without --prompt"),
        ("--batch-size 2", "--output and --batch-size: expected them with --prompts-file"),
        ("--prompt-format none.jinja", "none.jinja: not found; expected a Jinja file"),
        ("--raw --template-args {}", "--raw: nothing stands around the text; expected it without --template-args"),
        ("--template-args {", "--template-args: Invalid JSON: EOF while parsing an object at line 1 column 1"),
        ("--template-args [1]", "--template-args: expected an object"),
        ('--template-args {"tools":1}', "--template-args: expected others than tools, which Pipetune gives"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(words: str, told: str, run: Run) -> None:
    code, out, line = run("--prompt", "Why?", *words.split())
    assert (code, out) == (2, "") and re.fullmatch(rf"error: {re.escape(told)} \(see docs/\w+\.md\)\n", line)


def test_what_needs_a_prompt_is_refused_without_one(run: Run) -> None:
    told = "error: --input: expected it with --prompt; a line of --prompts-file has its own (see docs/demo.md)\n"
    assert run("--input", "?") == run("--input", "?", "--prompts-file", "x", "--output", "y") == (2, "", told)
    told = "error: --raw: goes on with one text; expected it with --prompt or --prompts-file (see docs/demo.md)\n"
    assert run("--raw") == (2, "", told)


def test_a_model_is_asked_as_it_was_trained(
    run: Run, folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, asked: list[list[int]]
) -> None:
    template = tmp_path / "mood.jinja"
    template.write_text("{{ mood }}{% for m in messages %}{{ m.content }}:{% endfor %}", encoding="utf-8")
    trained = tmp_path / "run"
    hg_to_pp(folder, trained / "step-1")
    (trained / "step-1" / "checkpoint.json").touch()
    (trained / "latest").write_text("step-1")
    config = {"prompt_format": str(template), "template_args": {"mood": "glad"}}
    (trained / "run.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    words = ("--prompt", "Why?", "--greedy")
    for model in (trained, trained / "step-1"):
        _, _, told = run(*words, "--model", str(model))
        assert told == (
            f"asked as the run was trained, prompt_format: {template}, template_args: {{'mood': 'glad'}} "
            f"({trained / 'run.json'})\n"
        )
    run(*words, "--model", str(trained), "--template-args", '{"mood": "sad"}')
    run(*words, "--model", str(trained), "--prompt-format", "plain")
    assert run(*words, "--prompt-format", str(template), "--template-args", '{"mood": "sad"}')[2] == ""
    assert "{" not in run(*words, "--model", str(trained), "--template-args", "{}")[2]
    assert tokenizer.decode(asked.pop()) == "Why?:"
    texts = [tokenizer.decode(prompt) for prompt in asked]
    assert texts[:3] == ["gladWhy?:", "gladWhy?:", "sadWhy?:"] and "### Instruction" in texts[3]
    assert texts[4] == "sadWhy?:"
    template.unlink()
    assert run(*words, "--model", str(trained))[0] == 2, "asked in another way it would answer worse"
    (trained / "run.json").write_text("{", encoding="utf-8")
    assert run(*words, "--model", str(trained))[::2] == (0, "")


def test_what_is_no_text_is_refused_and_a_chat_goes_on(
    run: Run, speaker: Speaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = r"'\udce9': no character; expected text, in UTF-8 where it comes from outside"
    for words in (("--prompt", "a\udce9"), ("--prompt", "a", "--system", "\udce9"), ("--raw", "--prompt", "\udce9")):
        code, _, line = run(*words)
        assert code == 2 and line == f"error: {told} (see docs/data.md)\n"
    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9\nWhy?\n\n"), encoding="utf-8")
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stdin", typed)
    chat = Chat(speaker, WISHES, pytest.fail)
    converse(chat)
    assert capsys.readouterr().err == f"error: {told}\n" and [each.text for each in chat.said[::2]] == ["Why?"]


def test_a_prompt_that_is_longer_than_the_context_is_refused(run: Run) -> None:
    code, out, told = run("--prompt", "Why? " * 300)
    assert (code, out) == (2, "") and told.count("\n") == 1
    assert told.startswith("error: the prompt has ") and "the model's context is 256" in told
    code, _, told = run(typed=("Why? " * 300, "Why?"))
    assert code == 0 and told.startswith("error: the prompt has "), "a chat goes on"
