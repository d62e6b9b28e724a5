"""Running chat templates, which anybody may have written: in transformers' sandbox, and for a limited time.

The sandbox keeps a template from files and from Python's insides, but not from looping for ever. So while templates are
rendered a thread looks once a second which rendering is still the same one, and after `LIMIT` looks ends it by an
exception in its thread. Looks are counted, not seconds: a process that was stopped meanwhile is not to blame. What
would stay inside one instruction for hours, a power or a product of gigantic numbers, is refused by its size.

Cost: 1.2 microseconds a rendering, where a record takes 15 to 150 to be written and more to be tokenized; the thread
ends when nothing is rendered any more.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import _compile_jinja_template

LIMIT = 10  # looks at the same rendering
INTERVAL = 1.0  # seconds between two looks
OF_DICTIONARIES = frozenset(dir(dict))
LARGEST = 10_000_000  # bits of a number, entries of a list, characters of a text


class SlowTemplate(Exception):
    """A template does not come to its end. No record's fault, so nobody takes it for one and tries the next."""

    def __init__(self) -> None:
        super().__init__(f"the chat template is still at one dialogue after {LIMIT * INTERVAL:.0f} seconds")


class _Watch:
    """`with watch:` around what may take too long.

    Raises:
        SlowTemplate: it did.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, int] = {}  # looks at what each thread renders
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._running[threading.get_ident()] = 0
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="template watch", daemon=True)
                self._thread.start()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running.pop(threading.get_ident(), None)

    def _look(self) -> None:
        while True:
            time.sleep(INTERVAL)
            with self._lock:  # nobody leaves meanwhile, so the exception meets the rendering that it is meant for
                if not self._running:
                    self._thread = None
                    return
                for thread in self._running:
                    self._running[thread] += 1
                    if self._running[thread] >= LIMIT:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread), ctypes.py_object(SlowTemplate)
                        )


_watch = _Watch()
os.register_at_fork(after_in_child=_watch.__init__)  # type: ignore[misc]  # the thread stayed in the parent


@lru_cache
def _environment() -> Environment:
    """transformers' sandbox, in an instance of our own."""
    environment = _compile_jinja_template("").environment
    environment.intercepted_binops = frozenset({"*", "**"})
    environment.call_binop = _product
    sandboxed = environment.getattr

    def attribute(value: Any, name: str) -> Any:
        # What the sandbox comes to as well, by way of two exceptions: two thirds of the time of a loop over messages.
        if type(value) is dict and name in value and name not in OF_DICTIONARIES:
            return value[name]
        return sandboxed(value, name)

    environment.getattr = attribute
    return environment


def _product(_: object, operator: str, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        size = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
    else:
        lengths = [len(side) for side in (left, right) if hasattr(side, "__len__")]
        size = max([0, *lengths]) * max([0, *(side for side in (left, right) if isinstance(side, int))])
    if size > LARGEST:
        raise SecurityError(f"{operator} of numbers this large is not allowed")
    return left**right if operator == "**" else left * right


@lru_cache
def compiled(text: str) -> Template:
    """A template ready to be rendered.

    Raises:
        jinja2.TemplateSyntaxError: it is damaged.
        SlowTemplate: it does not come to its end.
    """
    with _watch:
        template = _environment().from_string(text)
    # Jinja copies them at every rendering, which takes three times as long as the rendering while they are a ChainMap.
    template.globals = dict(template.globals)
    return template


def render(text: str, **names: Any) -> str:
    """What a template writes.

    Raises:
        SlowTemplate: it does not come to its end.
        Exception: whatever the template raises.
    """
    template = compiled(text)
    with _watch:
        return template.render(names)


def generated_spans(text: str, **names: Any) -> list[tuple[int, int]]:
    """The ranges of characters that a template marks as generated; raises as `render` does."""
    template = compiled(text)
    environment: Any = template.environment
    blocks: list[str] = []
    spans: list[tuple[int, int]] = []
    with _watch, environment.activate_tracker(blocks, spans):
        for block in template.generate(names):
            blocks.append(block)  # one by one: the tracker counts what is there
    return [(begin, end) for begin, end in spans if begin < end]
