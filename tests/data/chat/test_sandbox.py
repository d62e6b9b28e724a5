"""Chat templates that do not come to an end are ended, wherever they are rendered."""

from __future__ import annotations

import resource
import signal
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import pytest
from jinja2.exceptions import SecurityError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from data.chat import sandbox
from data.chat.messages import Said
from data.chat.prompts import check_prompt_format
from data.chat.sandbox import LargeTemplate, SlowTemplate, render
from data.errors import DataError
from data.tokenized.tokenize import encode_many, encode_question
from tests.accidents import limited
from tests.cases import tiered

LOOP = "{% for _ in range(99999) %}"
ENDLESS = LOOP * 4 + "{% endfor %}" * 4
ENDLESS_MACRO = (
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
)
RECORD = {"type": "instruct", "instruct": "?", "output": "!"}


MANY = "{% set many = range(99999) | list %}"
ENDLESS_TEMPLATES = {
    "loops": ENDLESS,
    "macros": ENDLESS_MACRO,
    "a loop that calls itself": "{% for _ in [1, 2] recursive %}{% if loop.depth < 90 %}{{ loop([1, 2]) }}{% endif %}"
    "{% endfor %}",
    "a condition that is never true": MANY + "{% for x in many if x not in many %}{% endfor %}",
    "a filter that tests": MANY + "{{ many | reject('in', many) | list }}",
    "slow filters": LOOP + "{{ range(99999) | sort(reverse=true) | length }}{% endfor %}",
}


@pytest.fixture(autouse=True)
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is endless is found out sooner; nothing here that comes to an end takes that long."""
    monkeypatch.setattr(sandbox, "LIMIT", 0.5)


@pytest.mark.parametrize("name", tiered(ENDLESS_TEMPLATES, slow=["macros", "slow filters"]))
def test_an_endless_template_is_ended(name: str) -> None:
    with pytest.raises(SlowTemplate, match="the chat template is still at one dialogue after"):
        render(ENDLESS_TEMPLATES[name])
    assert render("{% for i in range(2) if i %}{{ i }}{% endfor %}") == "1"  # what is rendered afterwards is not


def test_time_that_the_process_does_not_have_is_not_counted() -> None:
    text = "{{ wait(seconds) }}{% for _ in range(999) %}{% endfor %}!"
    assert render(text, wait=time.sleep, seconds=3 * sandbox.LIMIT) == "None!"


def test_a_thread_beside_the_main_one_renders_without_limits() -> None:
    outcomes: SimpleQueue[str] = SimpleQueue()
    text = "{% for _ in range(9) %}x{% endfor %}"
    thread = threading.Thread(target=lambda: outcomes.put(render(text)))
    thread.start()
    thread.join()
    assert outcomes.get() == 9 * "x"


DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"


def doubling(step: str, start: str = "'ab'") -> str:
    return DOUBLING.replace("STEP", step).replace("START", start)


LARGE = {
    "product of a text": "{{ 'x' * 10 ** 12 }}",
    "product of a list": "{{ [1] * n * n }}",
    "~": doubling("ns.x ~ ns.x"),
    "+ of lists": doubling("ns.x + ns.x", "[1]"),
    "join of a loop": "{{ range(99999) | map('string') | map('center', 9999) | join }}",
    "replace by a method": "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "format": doubling("'{0}{0}'.format(ns.x)"),
    "a computed width in %": "{{ '%*d' % (999999999, 1) }}",
    "tojson": "{{ [1] | tojson(indent=999999999) }}",
    "a captured block": doubling("y").replace(
        "{% set ns.x = y %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "a macro's output": "{% macro f() %}" + LOOP * 2 + "0123456789{% endfor %}{% endfor %}{% endmacro %}{{ f() }}",
    "piece by piece": LOOP * 2 + "0123456789" + "{% endfor %}" * 2,
}
MEMORY = 100_000_000


@pytest.mark.parametrize("name", tiered(LARGE, slow=["a macro's output", "piece by piece"]))
def test_a_template_that_makes_far_more_than_it_is_given_is_ended_before_it_takes_the_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "LIMIT", 10.0)
    monkeypatch.setattr(sandbox, "MEMORY", MEMORY)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(LargeTemplate, match=r"takes more than 0\.1 GB of memory for one dialogue"):
        render(LARGE[name], n=10**6)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * MEMORY / 1000  # kilobytes


@pytest.mark.slow
def test_a_number_that_grows_without_an_end_is_ended() -> None:
    with pytest.raises(SlowTemplate):
        render("{{ 9 ** (9 ** 9) }}")


def test_limits_are_those_of_the_process_again_behind_a_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MEMORY", MEMORY)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    with pytest.raises(LargeTemplate):
        render(LARGE["product of a text"])
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert len(bytearray(3 * MEMORY)) == 3 * MEMORY


def test_a_limit_that_the_user_set_stays_where_it_is_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MEMORY", 2**50)
    with limited(resource.RLIMIT_AS, 2**45), pytest.raises(LargeTemplate):
        render("{{ 'x' * 10 ** 14 }}")


def test_marks_of_what_is_generated_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "LIMIT", 10.0)
    monkeypatch.setattr(sandbox, "MEMORY", MEMORY)
    text = "{% generation %}" + doubling("ns.x ~ ns.x") + "{% endgeneration %}"
    with pytest.raises(LargeTemplate):
        sandbox.generated_spans(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ 2 ** 10 }} {{ 3 * 'ab' }} {{ 1.5 * 2 }} {{ 2 ** -1 }} {{ 7 * 6 }}", "1024 ababab 3.0 0.5 42"),
        ("{{ '%d' % 1700000000 }} {{ '{:,}'.format(1700000000) }} {{ '%5.1f' % 2 }}", "1700000000 1,700,000,000   2.0"),
        ("{{ [1, 'ab'] + [n] }} {{ (1,) + (2,) }} {{ {'a': [1]} }}", "[1, 'ab', 1000000] (1, 2) {'a': [1]}"),
        ("{{ range(3) | map('string') | join('-') }} {{ '-'.join(range(3) | map('string')) }}", "0-1-2 0-1-2"),
        ("{% for a, b in {'x': 1}.items() %}{{ a ~ b }}{% endfor %}{% set c, d = (3, 4) %}{{ d }}", "x14"),
        ("{{ 1700000000 | tojson }} {{ [1] | tojson(indent=2) }} {{ n | default(1700000000) }}", None),
        pytest.param(
            "{% macro f(n) %}{{ n }}{% endmacro %}{{ f(1700000000) }}{{ 'a b' | title | center(7) }}",
            "1700000000  A B  ",
            marks=pytest.mark.slow,
        ),
        ("{% set x %}{{ n }}{% endset %}{{ x }}{% filter upper %}a{{ n }}{% endfilter %}", "1000000A1000000"),
    ],
)
def test_what_is_no_larger_is_what_transformers_makes(text: str, expected: str | None) -> None:
    assert render(text, n=10**6) == _compile_jinja_template(text).render(n=10**6)
    assert expected is None or render(text, n=10**6) == expected


def test_a_long_dialogue_may_be_written_several_times() -> None:
    words = "x" * 600_000
    text = "{% set x = words ~ words %}{{ x + x }}{{ x | replace('y', 'z') }}{{ [x] | tojson }}"
    assert len(render(text, words=words)) == 8 * len(words) + 4


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


def test_a_template_that_makes_too_much_ends_the_run_in_one_line(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MEMORY", MEMORY)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}" + doubling("ns.x ~ ns.x")
    with pytest.raises(DataError, match=r"^the chat template takes more than 0\.1 GB of memory") as caught:
        encode_many([RECORD], tokenizer)
    assert "\n" not in str(caught.value)
    path = tmp_path / "large.jinja"
    path.write_text(tokenizer.chat_template, encoding="utf-8")
    with pytest.raises(DataError, match=r"large\.jinja: the chat template takes more than"):
        check_prompt_format(str(path))
    path.write_text(ENDLESS, encoding="utf-8")
    with pytest.raises(DataError, match=r"large\.jinja: the chat template is still at one dialogue"):
        check_prompt_format(str(path))
