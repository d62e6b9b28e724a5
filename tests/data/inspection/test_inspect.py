"""`--inspect` shows samples as the model gets them: what is trained is styled, the rest is not, counts are right."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import numpy
import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from data.chat.prompts import PromptFormat
from data.errors import DataError
from data.inspection.inspect import (
    MARKS,
    SUPERVISED_STYLE,
    TURN_ENDS,
    choose_samples,
    coloured,
    show_samples,
    write_page,
)
from data.sample_set import Sample
from data.tokenized.tokenize import encode
from tests.data.caches import Load
from tests.data.helpers import RECORDS, runs, runs_of

STYLED = re.compile(r"\x1b\[1;32m(.*?)\x1b\[0m")


def recorded(samples: list[Sample], tokenizer: PreTrainedTokenizerBase, styles: bool) -> str:
    console = Console(record=True, file=StringIO(), width=100, force_terminal=True, color_system="standard")
    show_samples(samples, tokenizer, console)
    return console.export_text(styles=styles)


@pytest.mark.parametrize("prompt_format", ["plain", "chat_template"])
@pytest.mark.parametrize("name", RECORDS)
def test_supervised_text_is_styled_and_the_rest_is_not(
    name: str, prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = coloured(encode(RECORDS[name], tokenizer, 10_000, prompt_format), tokenizer)
    expected = runs(RECORDS[name], tokenizer, prompt_format)
    assert text.plain.replace(TURN_ENDS, "") == "".join(part for _, part in expected)
    styled = [text.plain[span.start : span.end] for span in text.spans if span.style == SUPERVISED_STYLE]
    assert styled == [part for supervised, part in expected if supervised]
    assert len(text.spans) == len(styled)


def test_what_is_trained_is_marked_with_and_without_colour(tokenizer: PreTrainedTokenizerBase) -> None:
    sample = encode(RECORDS["ref_qa"], tokenizer, 10_000)
    expected = ["One.<|im_end|>", "两个。<|im_end|>", "supervised"]  # the last is the legend
    assert STYLED.findall(recorded([sample], tokenizer, styles=True)) == expected
    printed = StringIO()
    show_samples([sample], tokenizer, Console(file=printed, width=200), ["a.jsonl: record 7"])
    begin, end = MARKS
    assert re.findall(f"{begin}(.*?){end}", printed.getvalue(), re.DOTALL) == expected
    assert "\na.jsonl: record 7\n" in printed.getvalue()


def test_a_line_stands_where_turns_end(tokenizer: PreTrainedTokenizerBase) -> None:
    shown = coloured(encode(RECORDS["conversation"], tokenizer, 10_000), tokenizer).plain
    whole = "".join(text for _, text in runs(RECORDS["conversation"], tokenizer))
    assert whole.count("<|im_end|>") == 4
    assert shown == whole.replace("<|im_end|>", "<|im_end|>" + TURN_ENDS)
    plain = coloured(encode(RECORDS["conversation"], tokenizer, 10_000, "plain"), tokenizer).plain
    assert plain.count(TURN_ENDS) == plain.count("<|im_end|>" + TURN_ENDS) == 2


def test_one_sample_of_each_type_of_record_is_shown_behind_the_first(tmp_path: Path, load: Load) -> None:
    user: dict[str, Any] = {"role": "user", "content": "q"}
    answer: dict[str, Any] = {"role": "assistant", "content": "a"}
    calls: list[Any] = [{"function": {"name": "f", "arguments": {}}}]
    records: list[dict[str, Any]] = [{"text": f"number {number}"} for number in range(4)]
    records += [{"messages": [user, answer]}, {"messages": [user, answer | {"tool_calls": calls}, answer]}]
    records += [{"messages": [user, answer | {"thinking": "t"}]}, {"question": "q", "answer": "a"}] * 2
    (tmp_path / "a.json").write_text(json.dumps(records))
    dataset = load(str(tmp_path / "a.json"))
    assert dataset.types == ["chat", "instruct", "pretrain", "reasoning_chat", "tool_chat"]
    assert choose_samples(dataset, 2) == [0, 1, 4, 5, 6, 7]
    assert choose_samples(dataset, 100) == list(range(10))


def test_text_is_printed_literally_and_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "[red]not markup[/red] :smile: 42 " + "long " * 60
    short: Sample = {"input_ids": [70, 71, 72, 73], "labels": [-100, -100, -100, 73]}
    samples = [short, encode({"type": "pretrain", "text": text}, tokenizer, 10_000)]
    printed = recorded(samples, tokenizer, styles=False)
    assert "sample 1: 4 tokens, 1 supervised (25%)" in printed
    assert re.search(r"sample 2: (\d+) tokens, \1 supervised \(100%\)", printed)
    assert f"\x1b[1;32m{text}<|im_end|>\x1b[0m" in recorded(samples, tokenizer, styles=True)


@pytest.mark.parametrize(("length", "left_out"), [(800, 0), (801, 1), (3000, 2200)])
def test_a_long_sample_is_shortened_in_its_middle(
    length: int, left_out: int, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    ids = tokenizer("one two three four five six seven " * length, add_special_tokens=False)["input_ids"][:length]
    sample: Sample = {"input_ids": ids, "labels": ids}
    printed = recorded([sample], tokenizer, styles=False)
    assert (f"\n[... {left_out:,} tokens are not shown ...]\n" in printed) == bool(left_out)
    assert ("not shown" in printed) == bool(left_out)
    shown = coloured(sample, tokenizer).plain.replace(TURN_ENDS, "")
    whole = tokenizer.decode(ids)
    assert shown[:50] == whole[:50] and shown[-50:] == whole[-50:]
    assert sum(len(numbers.split()) for _, numbers, _ in Page(page_of([sample], tokenizer, tmp_path)).tokens) == length


class Page(HTMLParser):
    """What a browser would take from a page: tokens with their marks, and whatever would load or run something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tokens: list[tuple[str, str, str]] = []
        self.active: list[str] = []
        self._open: tuple[str, str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if tag in ("script", "img", "link", "iframe", "object") or known.keys() & {"src", "href", "onclick"}:
            self.active.append(tag)
        if tag in ("b", "i") and "title" in known:
            self._open = (tag, str(known["title"]))
            self.tokens.append((*self._open, ""))

    def handle_data(self, data: str) -> None:
        if self._open:
            self.tokens[-1] = (*self._open, self.tokens[-1][2] + data)

    def handle_endtag(self, tag: str) -> None:
        self._open = None


def page_of(samples: list[Sample], tokenizer: PreTrainedTokenizerBase, folder: Path, title: str = "Run") -> str:
    write_page(samples, tokenizer, folder / "page.html", title)
    return (folder / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RECORDS)
def test_the_page_holds_every_token_and_colours_what_is_trained(
    name: str, tokenizer: PreTrainedTokenizerBase, sentencepiece: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    for each in (tokenizer, sentencepiece):
        sample = encode(RECORDS[name], each, 10_000)
        tokens = Page(page_of([sample], each, tmp_path)).tokens
        assert [int(number) for _, ids, _ in tokens for number in ids.split()] == sample["input_ids"]
        for supervised, tag in ((True, "b"), (False, "i")):
            shown = "".join(text.replace("↵\n", "\n") for kind, _, text in tokens if kind == tag)
            expected = "".join(text for loss, text in runs_of(sample, each) if loss == supervised)
            assert shown.replace(" ", "") == expected.replace(" ", "")  # decoding drops blanks after control tokens
        assert all("\ufffd" not in text for _, _, text in tokens)


def test_the_page_stands_alone_and_lets_no_record_in(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    evil = '</pre><script>alert(1)</script><img src=x onerror="alert(2)"> & &amp; {title}\r\n" onclick="x'
    record = {"type": "instruct", "instruct": evil, "output": evil}
    text = page_of([encode(record, tokenizer, 10_000, "plain")], tokenizer, tmp_path, "<b>Run</b>")
    page = Page(text)
    assert page.active == []
    assert "".join(shown for kind, _, shown in page.tokens if kind == "b").startswith(evil[:-3].partition("\r")[0])
    assert "http" not in text.replace("http-equiv", "")
    assert "<title>&lt;b&gt;Run" in text


def test_the_page_counts_each_sample_and_shows_control_tokens(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    sample = encode(RECORDS["ref_qa"], tokenizer, 10_000)
    text = page_of([sample, sample], tokenizer, tmp_path)
    supervised = sum(label != -100 for label in sample["labels"])
    assert f"sample 2: {len(sample['input_ids'])} tokens, {supervised} supervised" in text
    assert '<b class="s" title="2">&lt;|im_end|&gt;</b>' in text
    with pytest.raises(DataError, match="cannot be written: Is a directory") as caught:
        write_page([], tokenizer, tmp_path, "Run")
    assert "\n" not in str(caught.value)


def test_stored_samples_are_shown_alike(tokenizer: PreTrainedTokenizerBase) -> None:
    sample = encode(RECORDS["conversation"], tokenizer, 10_000)
    stored: Any = {key: numpy.array(value, dtype=numpy.int32) for key, value in sample.items()}
    assert recorded([stored], tokenizer, styles=True) == recorded([sample], tokenizer, styles=True)
