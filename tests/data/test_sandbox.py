"""Chat templates that do not come to an end are ended, wherever they are rendered."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest
from jinja2.exceptions import SecurityError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from data.chat import sandbox
from data.chat.messages import Said
from data.chat.prompts import check_prompt_format
from data.chat.sandbox import SlowTemplate, render
from data.errors import DataError
from data.tokenized.tokenize import encode_many, encode_question

LOOP = "{% for _ in range(99999) %}"
ENDLESS = LOOP * 4 + "{% endfor %}" * 4
ENDLESS_MACRO = (
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
)
RECORD = {"type": "instruct", "instruct": "?", "output": "!"}


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is endless is found out sooner; nothing here that comes to an end is rendered while it counts."""
    monkeypatch.setattr(sandbox, "INTERVAL", 0.05)


@pytest.mark.parametrize("text", [ENDLESS, ENDLESS_MACRO])
def test_an_endless_template_is_ended(text: str) -> None:
    for _ in range(2):
        with pytest.raises(SlowTemplate, match="the chat template is still at one dialogue after"):
            render(text)
    assert render("{{ 1 + 1 }}") == "2"  # and what is rendered afterwards is not


def test_it_is_ended_in_any_thread() -> None:
    outcomes: SimpleQueue[type[BaseException]] = SimpleQueue()

    def work() -> None:
        try:
            render(ENDLESS)
        except BaseException as error:
            outcomes.put(type(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outcomes.get(), outcomes.get()] == [SlowTemplate, SlowTemplate]


def _ends() -> None:
    try:
        render(ENDLESS)
    except SlowTemplate:
        raise SystemExit(7) from None


def test_it_is_ended_in_a_process_that_was_forked_while_another_template_was_watched() -> None:
    render("the watch begins")
    process = multiprocessing.get_context("fork").Process(target=_ends)
    process.start()
    process.join()
    assert process.exitcode == 7


@pytest.mark.parametrize(
    "text",
    ["{{ 9 ** (9 ** 9) }}", "{{ 'x' * 10 ** 12 }}", "{{ [1] * n * n }}", "{% if false %}{{ 9**(9**9) }}{% endif %}"],
)
def test_gigantic_numbers_are_refused_and_others_counted(text: str) -> None:
    if "false" in text:
        assert render(text) == ""
    else:
        with pytest.raises(SecurityError, match="numbers this large"):
            render(text, n=10**6)
    assert render("{{ 2 ** 10 }} {{ 3 * 'ab' }} {{ 1.5 * 2 }} {{ 2 ** -1 }} {{ 7 * 6 }}") == "1024 ababab 3.0 0.5 42"


def test_a_template_that_is_endless_for_some_records_is_no_fault_of_theirs(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}<|im_end|>{% if m.content == '?' %}"
        + ENDLESS
        + "{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match="still at one dialogue"):
        encode_many([RECORD], tokenizer)
    with pytest.raises(DataError, match="still at one dialogue"):
        encode_question([Said("user", "?")], tokenizer)


def test_a_template_file_is_tried_before_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "endless.jinja"
    path.write_text(ENDLESS, encoding="utf-8")
    with pytest.raises(DataError, match=r"endless\.jinja: the chat template is still at one dialogue"):
        check_prompt_format(str(path))


@pytest.mark.parametrize(
    "text",
    [
        "{{ m.role }} {{ m['role'] }} {{ m.get('role') }} {{ m.absent is defined }} {{ m.absent }}",
        "{% for name, value in m.items() %}{{ name }}={{ value }} {% endfor %}",  # an entry of that name is there, too
        "{{ m.keys() | list }} {{ m.nested.deep }} {{ m.nested.values() | list }} {{ m.role.upper() }}",
        "{% set ns = namespace(a=m.role) %}{{ ns.a }}{{ m['items'] }}{{ m.none is none }}{{ loop is defined }}",
    ],
)
def test_entries_are_what_transformers_finds(text: str) -> None:
    message = {"role": "user", "items": "entry", "keys": 1, "nested": {"deep": [1]}, "none": None}
    theirs = _compile_jinja_template(text).render(m=message)
    assert render(text, m=message) == theirs


def test_the_insides_of_python_stay_closed() -> None:
    for text in ("m.__class__", "m.get.__self__", "m | attr('__class__')"):
        assert render(f"{{{{ {text} }}}}", m={"a": 1}) == ""
    for text in ("m.__init__.__globals__", "m.update({'a': 2})"):
        with pytest.raises(SecurityError):
            render(f"{{{{ {text} }}}}", m={"a": 1})
