"""A dialogue: what is asked, when an answer ends, what is forgotten and saved, and calls of tools."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.chat.answer_form import CallForm
from data.chat.chat_template import chat_template
from data.chat.fallbacks import EXAMPLE_TOOL, QUESTION
from data.chat.messages import Call, Said
from data.chat.prompts import Prompts
from data.errors import DataError
from data.records.formats import convert
from data.records.raw_records import read_file
from data.records.reading import parse
from data.tokenized.tokenize import encode
from data.tokenized.tokenizer import load_tokenizer
from options.demo.chat import ChatSession, read_tools
from options.demo.chat_model import Answer, AnswerOptions, ChatModel
from options.demo.command_line import converse
from options.demo.generation import GREEDY, generate_many
from tests.cases import tiered
from tests.conftest import save_original
from tests.data.helpers import parse_record
from tests.data.published_tokenizers import CLASSES, Published, flat
from tests.data.template_styles import HARMONY, STYLES, Style
from tests.options.demo.conftest import WIDE, Make, RunDemo, memorize

SHORT, LONGER = AnswerOptions(6, GREEDY), AnswerOptions(12, GREEDY)
BRIEF = Said("system", "Be brief.")
Ids = Callable[[list[dict[str, str]]], list[int]]  # of messages, up to where the answer to the last one begins

# By tokenizer: the model_type, its vocabulary's key and size, and the token before an answer.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "chatglm3": ("chatglm", {"padded_vocab_size": 65_024}),
    "baichuan2": ("baichuan", {"vocab_size": 125_696}),
}
REFERENCE = {
    "type": "ref_qa",
    "reference": "Lion keeps one state.",
    "rounds": [["ask", "How many?"], ["ans", "One."], ["ask", "And AdamW?"], ["ans", "两个。"]],
}
CALLING = [{"function": {"name": "look", "arguments": {"up": word}}} for word in "ab"]
WITH_CALLS = {
    "tools": [EXAMPLE_TOOL],
    "messages": [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "tool_calls": CALLING},
        {"role": "tool", "content": "north"},
        {"role": "tool", "content": '{"there": 1}'},
        {"role": "assistant", "content": "North, 一."},
    ],
}


@pytest.fixture(params=tiered(["chatml", "llama3.1", "chatglm3", "qwen", "baichuan2"], quick=["llama3.1", "qwen"]))
def rendered(request: pytest.FixtureRequest, make_checkpoint: Make, tmp_path: Path) -> tuple[Path, Ids]:
    """A model, and the ids of a dialogue: as transformers renders it, or the classes that transformers lacks."""
    if request.param in PUBLISHED:
        model_type, sizes = PUBLISHED[request.param]
        published = Published(request.param, tmp_path)
        save_original(tmp_path, model_type, {}, **WIDE, **sizes)
        return tmp_path, lambda messages: [*flat(published.chat(messages))["input_ids"], *published.asked()]
    if request.param in CLASSES:
        published = Published(request.param, tmp_path)
        save_original(tmp_path, request.param, {}, **WIDE, vocab_size=len(published.tokenizer))
        return tmp_path, lambda messages: published.beginning + published.original(chatml(messages))
    folder = make_checkpoint("llama", vocab_size=560, **WIDE)
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
    model = ChatModel(folder)
    model.context = None
    encode = model.encode
    model.encode = lambda *given: asked.append(encode(*given)) or asked[-1]  # type: ignore[method-assign,func-returns-value]
    chat = ChatSession(model, SHORT, pytest.fail, [BRIEF])
    messages: list[dict[str, str]] = [{"role": "system", "content": BRIEF.text}]
    for turn in range(20):
        messages.append({"role": "user", "content": f"Question {turn}?"})
        answer = "".join(chat.ask(f"Question {turn}?"))
        assert asked[-1] == ids_of(messages)
        messages.append({"role": "assistant", "content": answer})
    assert len({message["content"] for message in messages[2::2]}) > 10, "too monotonous to show anything"


@pytest.mark.slow
@settings(max_examples=1000)
@given(st.data())
def test_an_answer_is_shown_as_it_comes_and_ends_before_a_stop_text_wherever_its_tokens_end(
    tokenizer_folder: Path, data: st.DataObject
) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    text = data.draw(st.text(alphabet="abU\n 三怎🙂", max_size=12))
    stop = data.draw(st.lists(st.text(alphabet="abU\n三", min_size=1, max_size=3), max_size=2))
    answer = Answer(tokenizer, stop)
    pieces, written = [], 0
    for token in tokenizer.tokenize(text):
        pieces.append(answer.add(tokenizer.convert_tokens_to_ids(token)))
        if answer.stopped:
            break
        written += len(token)  # in bytes, which its letters stand for
        known = text.encode()[:written].decode(errors="ignore")
        begun = [length for each in stop for length in range(1, len(each)) if known.endswith(each[:length])]
        assert "".join(pieces) == known[: len(known) - max(begun, default=0)].lstrip()
    pieces.append(answer.end())
    whole = [(place + len(each), place) for each in stop if (place := text.find(each)) >= 0]
    assert answer.raw == text[: min(whole)[1] if whole else None]
    assert "".join(pieces) == answer.text == answer.raw.lstrip()


def test_a_continued_text_keeps_the_blank_that_a_decoder_drops() -> None:
    words = Tokenizer(models.WordLevel({"▁a": 0, "▁Lima": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert Answer(tokenizer, []).add(1) == "Lima"
    assert Answer(tokenizer, [], continues=True).add(1) == " Lima"


def test_a_full_context_drops_the_oldest_rounds_and_then_shortens_the_answer(folder: Path) -> None:
    model, lines = ChatModel(folder), list[str]()
    chat = ChatSession(model, SHORT, lines.append, [BRIEF])
    model.context = 2 * len(model.encode([*chat.said, Said("user", "Why?")]))
    for _ in range(6):
        list(chat.ask("Why?"))
        assert len(model.encode(chat.said[:-1])) + SHORT.max_new_tokens <= model.context
        assert chat.said[0] == BRIEF
    assert lines and all("left out" in line for line in lines)
    prompt = model.encode([Said("user", "Why?")])
    model.context = len(prompt) + 2
    lines.clear()
    list(ChatSession(model, SHORT, lines.append).ask("Why?"))
    assert lines == [f"the context of {model.context} tokens has room for 2 tokens of the answer"]
    request = model.request(prompt, SHORT)
    assert [len(request.text) for _ in generate_many(model.model, [request])][-1] == model.context


def test_a_chat_is_forgotten_and_saved(folder: Path, run_demo: RunDemo, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    typed = ("/save x", "One?", "Two?", f"/save {path}", "/reset", "One?", f"/save {path}", "/what", "")
    words = ("--greedy", "--max-new-tokens", "6", "--system", BRIEF.text)
    code, out, error = run_demo(folder, *words, typed="\n".join(typed))
    assert (code, error.splitlines()) == (
        0,
        ["error: nothing was said yet; expected a question first", "/what: expected /reset or /save FILE"],
    )
    long, short = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert [message["role"] for message in long] == ["system", *["user", "assistant"] * 2]
    assert short == long[:3], "after /reset the same question has the same answer"
    assert long[2]["content"].splitlines()[0] in out
    assert all(parse(raw, None, {}).records for raw in read_file(path)), "what is saved can be trained on"


def test_a_question_that_is_no_text_or_too_long_is_refused_and_the_chat_goes_on(
    folder: Path, run_demo: RunDemo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = r"error: '\udce9': no character; expected text, in UTF-8 where it comes from outside"
    for words in (("--prompt", "a\udce9"), ("--prompt", "a", "--system", "\udce9"), ("--raw", "--prompt", "\udce9")):
        assert run_demo(folder, *words) == (2, "", f"{line} (see docs/data.md)\n")
    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9\nWhy?\n\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", typed)
    chat = ChatSession(ChatModel(folder), SHORT, pytest.fail)
    converse(chat)
    assert capsys.readouterr().err == f"{line}\n" and [each.text for each in chat.said[::2]] == ["Why?"]
    code, out, error = run_demo(folder, "--prompt", "Why? " * 300)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: the prompt has ") and "the model's context is 256" in error
    code, _, error = run_demo(folder, "--max-new-tokens", "6", typed="Why? " * 300 + "\nWhy?\n")
    assert code == 0 and error.startswith("error: the prompt has ")


def test_a_dialogue_goes_on_where_the_template_refuses_its_own_tags(recite: Make) -> None:
    folder = recite("<|channel|>final<|message|>Lima.<|return|>", HARMONY, "<|return|>")
    chat = ChatSession(ChatModel(folder), LONGER, pytest.fail)
    for question in ("One?", "Two?", "Three?"):
        assert "".join(chat.ask(question)) == "<|channel|>final<|message|>Lima."
    assert [each.text for each in chat.said[1::2]] == ["Lima."] * 3


def test_thoughts_are_saved_apart_and_trained_as_they_were_written(recite: Make, tmp_path: Path) -> None:
    folder = recite("<think>Hm.</think>Lima<|im_end|>", STYLES["qwen3"])
    chat = ChatSession(ChatModel(folder), LONGER, pytest.fail)
    for question in ("One?", "Two?"):
        assert "".join(chat.ask(question)) == "<think>Hm.</think>Lima"
    assert [(each.reasoning, each.text) for each in chat.said[1::2]] == [("Hm.", "Lima")] * 2
    chat.save(tmp_path / "saved")
    record, tokenizer = json.loads((tmp_path / "saved").read_text(encoding="utf-8")), load_tokenizer(folder)
    sample = encode(record, tokenizer, 1000)
    assert tokenizer.decode(sample["input_ids"]).rstrip().endswith("<think>\nHm.\n</think>\n\nLima<|im_end|>")


def model_of(make_checkpoint: Make, style: Style | None = None) -> Path:
    folder = make_checkpoint("llama", vocab_size=560, max_position_embeddings=1024)
    if style:
        style.put_on(load_tokenizer(folder)).save_pretrained(folder)
    return folder


def test_a_call_gets_its_typed_result_and_an_answer_follows(
    make_checkpoint: Make, tmp_path: Path, run_demo: RunDemo
) -> None:
    folder, (record,) = model_of(make_checkpoint, STYLES["qwen2.5"]), convert(WITH_CALLS).records
    memorize(folder, record)
    (tmp_path / "tools").write_text(json.dumps([EXAMPLE_TOOL]))
    words = ("--greedy", "--tools", tmp_path / "tools")
    typed = ["Where is it?", "north", '{"there": 1}', f"/save {tmp_path / 'saved'}", ""]
    code, out, error = run_demo(folder, *words, typed="\n".join(typed))
    assert code == 0 and out.count("<tool_call>") == 2 and "North, 一.\n" in out
    assert error.splitlines() == ['call: look {"up": "a"}', 'call: look {"up": "b"}']
    (raw,) = read_file(tmp_path / "saved")
    (saved,) = parse(raw, None, {}).records
    tokenizer = load_tokenizer(folder)
    assert encode(saved, tokenizer, 1000) == encode(record, tokenizer, 1000)
    code, out, error = run_demo(folder, *words, "--prompt", "Where is it?")  # nobody types a result
    assert code == 0 and out.count("<tool_call>") == 2 and error.startswith('call: look {"up": "a"}')
    code, _, error = run_demo(folder, *words, "--prompt", "?", "--prompt-format", "plain")
    assert code == 2 and error.startswith("error: --tools: expected a model whose chat template takes tools")


def test_a_reference_is_asked_about_as_in_training(make_checkpoint: Make, tmp_path: Path, run_demo: RunDemo) -> None:
    folder = model_of(make_checkpoint)
    memorize(folder, parse_record(REFERENCE))
    (tmp_path / "reference").write_text("Lion keeps one state.\n")
    words = ("--greedy", "--reference", tmp_path / "reference")
    _, out, error = run_demo(folder, *words, typed="How many?\nAnd AdamW?\n")
    assert (out.partition("\n")[2], error) == ("> One.\n> 两个。\n> \n", "")


KNOWN = [
    Call(f"call0000{number}", f"tool_{number}", {"a": [1, {"b": 'x"}\n'}], "c": None, "名": "块"}) for number in (1, 2)
]


@pytest.mark.parametrize("style", ["qwen2.5", "qwen3", "llama3.1", "mistral"])
@pytest.mark.parametrize("words", ["", "Let me see."])
def test_calls_are_read_back_as_a_template_writes_them(style: str, words: str, tokenizer_folder: Path) -> None:
    template = chat_template(STYLES[style].put_on(load_tokenizer(tokenizer_folder)), Prompts(), tools=True)
    form = template.call_form()
    assert isinstance(form, CallForm)
    for count in (1, 1 if style == "llama3.1" else 2):  # which takes one call at a time
        said = [QUESTION, Said("assistant", words, calls=tuple(KNOWN[:count]))]
        written = template._rendering.text(said, [EXAMPLE_TOOL])
        answer = written[len(template._rendering.text([QUESTION], [EXAMPLE_TOOL], asking=True)) :]
        found, calls = form.read(answer, 1)
        assert list(calls) == KNOWN[:count]
        assert found.endswith(words) or style in ("llama3.1", "mistral")  # which leave out words beside a call


@pytest.mark.parametrize("style", ["smollm2", "chatglm3", "gemma"])
def test_a_template_without_tools_has_no_form_of_calls(style: str, tokenizer_folder: Path) -> None:
    tokenizer = STYLES[style].put_on(load_tokenizer(tokenizer_folder))
    assert chat_template(tokenizer, Prompts(template_fallback="rewrite"), tools=True).call_form() is None


def test_an_incomplete_call_is_refused(tokenizer_folder: Path) -> None:
    tokenizer: PreTrainedTokenizerBase = STYLES["qwen2.5"].put_on(load_tokenizer(tokenizer_folder))
    form = chat_template(tokenizer, Prompts(), tools=True).call_form()
    assert form is not None and form.read("Nothing to call.", 1) == ("Nothing to call.", ())
    for text in ('{"name": "look", "arguments": {"up"', '{"name": "look"}', '{"name": "a b", "arguments"'):
        with pytest.raises(ValueError, match=r"no name with arguments|no JSON object"):
            form.read(f"<tool_call>\n{text}\n</tool_call>", 1)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("[]", "expected a list of tools, each with a function that has a name"),
        ("{", "no JSON: "),
        ('{"a": 1}', "field tools: expected a list"),
        ('[{"type": "function"}]', "expected a list of tools, each with a function that has a name"),
        ("", "expected a text, found none"),
    ],
)
def test_a_file_without_tools_is_refused(content: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(content)
    with pytest.raises(DataError) as refused:
        read_tools(str(path))
    assert str(refused.value).startswith(f"{path}: {line}")
