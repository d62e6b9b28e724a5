"""Define the config's keys for prompts: how records are written.

A record is written by a chat template (`data.chat.chat_template`), the tokenizer's own or one from a file, in the plain
format (`data.chat.plain`, the well-known instruction prompt) or as gdGPT writes it (`data.chat.gdgpt`). demo.py asks
through the same functions, so that a model is asked exactly as it was trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from common.terminal import reason_of
from data.errors import DataError
from data.paths import read_small
from data.settings import CHAT_TEMPLATE, GDGPT, NAMED, PLAIN, Fallback, Mask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_prompt_format(value: str) -> str:
    """Give `value` back if it is one of `NAMED`, or the path of a Jinja file that can be used as a chat template.

    Raises:
        DataError: it is none of them, the file is missing or no text, or its template is damaged.
    """
    if value not in NAMED:
        template_in_file(value)
    return value


def template_in_file(path: str) -> str:
    """Read a user's chat template. It runs in the sandbox that transformers runs templates in.

    Raises:
        DataError: see `check_prompt_format`.
    """
    try:
        text = read_small(path).decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        if not Path(path).suffix:  # a word, not a path
            raise DataError(f"{path}: expected {', '.join(map(repr, NAMED))}, or the path of a Jinja file") from None
        raise DataError(f"{path}: not found; expected a Jinja file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start}: not UTF-8; expected a Jinja file in UTF-8") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}; expected a Jinja file") from None
    from jinja2 import TemplateSyntaxError  # with transformers, which a config that names no file does without

    from data.chat.sandbox import SlowTemplate, render

    try:
        render(text, messages=[{"role": "user", "content": "?"}])
    except SlowTemplate as error:
        raise DataError(f"{path}: {error}; expected another Jinja file") from None
    except TemplateSyntaxError as error:
        raise DataError(f"{path}: line {error.lineno}: {error.message}; expected a Jinja template") from None
    except Exception:  # the template refuses these words; whether it takes the records is another question
        return text
    return text


def _validate(value: str) -> str:
    try:
        return check_prompt_format(value)
    except DataError as error:
        raise PydanticCustomError(
            "prompt_format", "{reason}", {"reason": str(error).removeprefix(f"{value}: ")}
        ) from None


# chat_template, plain, gdgpt, or the path of a Jinja file; pydantic checks it.
PromptFormat = Annotated[str, AfterValidator(_validate)]


@dataclass(frozen=True)
class Prompts:
    """Hold the config's keys for prompts."""

    # The tokenizer's chat template when it ships one, else plain, where absent.
    prompt_format: PromptFormat | None = None
    # What the template gets beside the messages, such as `enable_thinking`.
    template_args: dict[str, Any] = field(default_factory=dict)
    # What to do about unsupported template features: rewrite them, or refuse the record. Where absent, system
    # messages, and roles that do not alternate, are rewritten; tools and thoughts are refused.
    template_fallback: Fallback | None = None
    # Which tokens are trained: all of the assistant's messages, those after the last question, or all.
    mask: Mask = "assistant"


AnyPrompts = Prompts | PromptFormat | None  # all keys for prompts, or the format alone


def as_prompts(given: AnyPrompts) -> Prompts:
    """Return all keys; a format alone leaves the others at their defaults."""
    return given if isinstance(given, Prompts) else Prompts(given)


def format_of(prompts: Prompts, tokenizer: PreTrainedTokenizerBase) -> PromptFormat:
    """Return the named format, else the tokenizer's own chat template, else plain."""
    return prompts.prompt_format or (CHAT_TEMPLATE if tokenizer.chat_template else PLAIN)


def templated(prompts: Prompts, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Say whether a chat template writes the prompts."""
    return format_of(prompts, tokenizer) not in (PLAIN, GDGPT)


def end_of_sequence(token: str | None) -> str:
    """Return the tokenizer's eos_token, which has to be there.

    Raises:
        DataError: it is not.
    """
    if not token:
        raise DataError("the tokenizer has no eos_token; expected one in tokenizer_config.json")
    return token
