"""Run untrusted chat templates in transformers' sandbox, with limited time and memory.

The sandbox keeps a template from files and from Python's insides, but not from looping for ever. So the code that Jinja
makes of a template counts its steps: the bodies of loops and macros that it enters and the values that it makes. Now
and then the thread's processor time is looked at, and what took `LIMIT` seconds of it is ended. It is not the time of a
clock: a process that was stopped meanwhile is not to blame.

Memory is limited by the size of values, since one instruction may take gigabytes before anybody looks. Every text and
list that a template makes is measured: what it writes, captures, joins, adds up, calls or filters. So all that an
operation starts from is small, no step takes long, and only the few in `GROWING`, which multiply, are looked at before
they are done.

Cost: 1.2 microseconds a rendering and 0.15 for each value that is made, where a record takes 15 to 150 to be written
and more to be tokenized.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, wraps
from itertools import count
from types import GeneratorType
from typing import Any

from jinja2 import Environment, Template, nodes
from jinja2.compiler import CodeGenerator
from transformers.utils.chat_template_utils import _compile_jinja_template

LIMIT = 10.0  # seconds of processor time for one rendering
STEPS = 32  # between two looks at the time: the slowest, a list's sorting, take a tenth of a second
OF_DICTIONARIES = frozenset(dir(dict))
# Bits of a number, characters of a text and entries of a list that a template may make, and how many times as much as
# it was given besides: a dialogue may be long itself, and its tools be written more than once, with escapes.
LARGEST, TIMES = 1_000_000, 10
# Functions, methods and filters whose result may be as large as the product of what they get.
GROWING = frozenset(
    "batch center expandtabs format format_map generate_lorem_ipsum indent join ljust replace rjust round slice tojson "
    "translate urlize wordwrap zfill".split()
)
COMPUTED_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|:[^{}]*\{")  # in a format: one of the values says how wide another gets


class SlowTemplate(Exception):
    """Report a template that timed out; not a record's fault, so the next record is not tried."""

    def __init__(self) -> None:
        super().__init__(f"the chat template is still at one dialogue after {LIMIT:.0f} seconds")


class LargeTemplate(SlowTemplate):
    """Report a template that makes far more than it was given."""

    def __init__(self) -> None:
        Exception.__init__(
            self,
            f"the chat template makes a text, list or number of more than {LARGEST:,} characters out of one dialogue",
        )


class _Rendering(threading.local):
    """Hold what a thread renders."""

    names: Any = None  # what the template is given
    end = float("inf")  # the thread's processor time at which it is ended

    def begin(self, names: dict[str, Any]) -> None:
        self.names, self.end = names, time.thread_time() + LIMIT


_rendering = _Rendering()
_steps = count(1)  # of all threads: a thread's own takes three times as long to count


def _step() -> bool:
    """Count a step; return True, so that it can stand in a condition."""
    if not next(_steps) % STEPS and time.thread_time() > _rendering.end:
        raise SlowTemplate
    return True


@lru_cache
def _environment() -> Environment:
    """Make an instance of transformers' sandbox with limits."""
    environment = _compile_jinja_template("").environment
    environment.intercepted_binops = frozenset({"*", "**", "%"})
    environment.call_binop = _product
    environment.code_generator_class = _Compiler
    environment.checked = _checked
    environment.step = _step
    environment.pieces = _Pieces
    environment.concat = _joined
    environment.filters = {name: _bounded(name, function) for name, function in environment.filters.items()}
    environment.tests = {name: _counting(function) for name, function in environment.tests.items()}
    namespace = environment.globals["namespace"]  # which may hold itself; only its name is written
    environment.globals["namespace"] = type("Namespace", (namespace,), {"__repr__": object.__repr__})
    calling = environment.call

    def call(context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if (name := getattr(function, "__name__", "")) in GROWING:
            text = getattr(getattr(function, "__wrapped__", function), "__self__", "")
            _, *args = _held(name, text, *args, **kwargs)  # type: ignore[assignment]
        return _checked(calling(context, function, *args, **kwargs))

    environment.call = call
    sandboxed = environment.getattr

    def attribute(value: Any, name: str) -> Any:
        # What the sandbox comes to as well, by way of two exceptions: two thirds of the time of a loop over messages.
        if type(value) is dict and name in value and name not in OF_DICTIONARIES:
            return value[name]
        return sandboxed(value, name)

    environment.getattr = attribute
    return environment


class _Pieces(list[str]):
    """Collect what a template writes, piece by piece."""

    size = 0

    def append(self, piece: str) -> None:
        self.extend([piece])

    def extend(self, pieces: Iterable[str]) -> None:
        for piece in pieces:
            self.size += len(piece) + 1
            _hold(self.size)
            super().append(piece)


def _joined(pieces: Iterable[str]) -> str:
    written = pieces if isinstance(pieces, _Pieces) else _Pieces()
    if written is not pieces:
        written.extend(pieces)
    return "".join(written)


class _Compiler(CodeGenerator):
    """Compile as Jinja does, and measure whatever makes a larger value of others."""

    def buffer(self, frame: Any) -> None:
        super().buffer(frame)
        self.writeline(f"{frame.buffer} = environment.pieces()")

    def blockvisit(self, body: Iterable[nodes.Node], frame: Any) -> None:
        self.writeline("environment.step()")
        super().blockvisit(body, frame)

    def visit_For(self, node: nodes.For, frame: Any) -> None:  # noqa: N802  # Jinja's name
        if node.test is not None:  # which may pass over every entry, and so enter no body
            step = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        super().visit_For(node, frame)


def _measured(visit: Callable[..., None]) -> Callable[..., None]:
    def measured(self: CodeGenerator, node: Any, frame: Any) -> None:
        stored = getattr(node, "ctx", "load") != "load"  # names that a loop sets
        self.write("" if stored else "environment.checked(")
        visit(self, node, frame)
        self.write("" if stored else ")")

    return measured


for _name in ("visit_Add", "visit_Concat", "visit_List", "visit_Tuple", "visit_Dict"):
    setattr(_Compiler, _name, _measured(getattr(CodeGenerator, _name)))


def _size(value: Any, most: float = float("inf")) -> int:
    """Count the characters and entries of a value; stop beyond `most`."""
    size, rest = 0, [value]
    while rest:
        each = rest.pop()
        size += len(each) + 1 if isinstance(each, (str, list, tuple, dict)) else 1
        if size > most:
            break
        if isinstance(each, dict):
            rest += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple)):
            rest += each
    return size


def _hold(size: float) -> None:
    """Raise LargeTemplate if this is more than a template may make."""
    if size > LARGEST and size > LARGEST + TIMES * _size(_rendering.names):
        raise LargeTemplate


def _checked(value: Any) -> Any:
    """Give a value back if it is no larger than a template may make it."""
    _step()
    if isinstance(value, str):
        _hold(len(value))
    elif isinstance(value, (list, tuple, dict)) and _size(value, LARGEST) > LARGEST:
        _hold(_size(value, LARGEST + TIMES * _size(_rendering.names)))
    return _counted(value) if isinstance(value, GeneratorType) else value


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    size = 0
    for value in values:
        _step()
        size += _size(value, LARGEST)
        _hold(size)
        yield value


def _held(name: str, subject: Any, /, *others: Any, **named: Any) -> tuple[Any, ...]:
    """Return the arguments of a growing function, generators as lists, if its result can be no larger than allowed."""
    values = [list(each) if isinstance(each, (GeneratorType, range)) else each for each in (subject, *others)]
    widths = name[:6] != "format" or COMPUTED_WIDTH.search(str(subject))
    written = 0 if name[:6] != "format" else sum(map(int, re.findall(r"\d+", str(subject))))
    sizes = [abs(each) if widths and isinstance(each, int) else _size(each) for each in (*others, *named.values())]
    one, other = sorted([1, 1, _size(values[0]) + written, *sizes])[-2:]
    _hold(one * other / TIMES)
    return tuple(values)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter to measure its results."""
    first = int(hasattr(function, "jinja_pass_arg"))  # Jinja's own argument stands before the value

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if name in GROWING:
            args = (*args[:first], *_held(name, *args[first:], **kwargs))
        return _checked(function(*args, **kwargs))

    return bounded


def _counting(test: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a test, which `select` and `reject` try on entry after entry, to count as a step."""

    @wraps(test)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _step()
        return test(*args, **kwargs)

    return counted


def _product(_: object, operator: str, left: Any, right: Any) -> Any:
    if operator == "%":
        if isinstance(left, str):
            _held("format", left, *(right if isinstance(right, tuple) else (right,)))
        return _checked(left % right)
    if isinstance(left, int) and isinstance(right, int):
        size = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
    else:
        lengths = [_size(side, LARGEST) for side in (left, right) if hasattr(side, "__len__")]
        size = max([0, *lengths]) * max([0, *(side for side in (left, right) if isinstance(side, int))])
    _hold(size)
    return left**right if operator == "**" else left * right


@lru_cache
def compiled(text: str) -> Template:
    """Compile a template.

    Raises:
        jinja2.TemplateSyntaxError: it is damaged.
    """
    template = _environment().from_string(text)
    # Jinja copies them at every rendering, which takes three times as long as the rendering while they are a ChainMap.
    template.globals = dict(template.globals)
    return template


def render(text: str, **names: Any) -> str:
    """Render a template.

    Raises:
        SlowTemplate: it timed out, or makes far more than it is given.
        Exception: whatever the template raises.
    """
    template = compiled(text)
    _rendering.begin(names)
    return template.render(names)


def generated_spans(text: str, **names: Any) -> list[tuple[int, int]]:
    """Find the ranges of characters that a template marks as generated; raises as `render` does."""
    template = compiled(text)
    environment: Any = template.environment
    blocks = _Pieces()
    spans: list[tuple[int, int]] = []
    _rendering.begin(names)
    with environment.activate_tracker(blocks, spans):
        blocks.extend(template.generate(names))  # one by one: the tracker counts what is there
    return [(begin, end) for begin, end in spans if begin < end]
