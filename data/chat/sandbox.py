"""Run untrusted chat templates in transformers' sandbox, with limited time and memory.

The sandbox keeps a template from files and from Python's insides, but not from looping for ever, nor from making texts
that fill the memory. The kernel does: a timer of processor time interrupts what takes `LIMIT` seconds of it (not of a
clock: a process that was stopped meanwhile is not to blame), and an allocation that takes more than `MEMORY` beyond
what the process has fails. Both hold for one rendering, and are taken back behind it.

Signals reach the main thread alone, so a template that another thread renders has no limit. Only windows of streamed
data below 1 MB are tokenized in one.

Cost: 10 microseconds a rendering, where a record takes 15 to 150 to be written and more to be tokenized.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any, NoReturn

from jinja2 import Template
from transformers.utils.chat_template_utils import _compile_jinja_template

LIMIT = 10.0  # seconds of processor time for one rendering
MEMORY = 2**30  # bytes for one rendering
PAGE = resource.getpagesize()
OF_DICTIONARIES = frozenset(dir(dict))


class SlowTemplate(Exception):
    """Report a template that timed out; not a record's fault, so the next record is not tried."""

    def __init__(self) -> None:
        super().__init__(f"the chat template is still at one dialogue after {LIMIT:.0f} seconds")


class LargeTemplate(SlowTemplate):
    """Report a template that makes far more than it was given."""

    def __init__(self) -> None:
        Exception.__init__(self, f"the chat template takes more than {MEMORY / 1e9:.1f} GB of memory for one dialogue")


@contextmanager
def _limited() -> Iterator[None]:
    """Limit what the block may take of processor time and memory."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    # All that the process has mapped, weights and a GPU's addresses too: only what comes on top is the template's.
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    file = os.open("/proc/self/statm", os.O_RDONLY)
    most = int(os.read(file, 32).split()[0]) * PAGE + MEMORY
    os.close(file)
    ended = False

    def end(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal ended
        ended = True
        raise SlowTemplate

    before = signal.signal(signal.SIGPROF, end)
    try:
        if soft == resource.RLIM_INFINITY or soft > most:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        # Once more each second, as Jinja passes over some exceptions.
        signal.setitimer(signal.ITIMER_PROF, LIMIT, 1.0)
        yield
    except MemoryError:
        raise LargeTemplate from None
    except Exception:
        if ended:  # Jinja, which looks for the line of the template, may raise another error where there is none
            raise SlowTemplate from None
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before or signal.SIG_DFL)  # None: of a handler that is not Python's


@lru_cache
def compiled(text: str) -> Template:
    """Compile a template.

    Raises:
        jinja2.TemplateSyntaxError: it is damaged.
    """
    template: Template = _compile_jinja_template(text)
    environment: Any = template.environment
    sandboxed = environment.getattr

    def attribute(value: Any, name: str) -> Any:
        # What the sandbox comes to as well, by way of two exceptions: two thirds of the time of a loop over messages.
        if type(value) is dict and name in value and name not in OF_DICTIONARIES:
            return value[name]
        return sandboxed(value, name)

    environment.getattr = attribute
    # Jinja copies them at every rendering, which takes three times as long as the rendering while they are a ChainMap.
    template.globals = dict(template.globals)
    return template


def render(text: str, **names: Any) -> str:
    """Render a template.

    Raises:
        SlowTemplate: it timed out, or takes far more memory than a dialogue needs.
        Exception: whatever the template raises.
    """
    with _limited():  # compiling, too, which computes what is constant
        return compiled(text).render(names)


def generated_spans(text: str, **names: Any) -> list[tuple[int, int]]:
    """Find the ranges of characters that a template marks as generated; raises as `render` does."""
    blocks: list[str] = []
    spans: list[tuple[int, int]] = []
    with _limited():
        template = compiled(text)
        environment: Any = template.environment
        with environment.activate_tracker(blocks, spans):
            for block in template.generate(names):  # one by one: the tracker counts what is there
                blocks.append(block)
    return [(begin, end) for begin, end in spans if begin < end]
