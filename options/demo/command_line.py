"""Parse the command line of demo.py and answer.

Slow imports come after the check of the options, so that a mistake is reported immediately.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from common.command_line import Parser
from common.terminal import safe_line, safe_text, typed_name
from data.chat.prompts import Prompts, check_prompt_format
from data.errors import DataError
from data.settings import GDGPT, PLAIN, TemplateArguments
from training.config.mistakes import in_our_words
from training.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from options.demo.chat import ChatSession
    from options.demo.generation import Passes
    from training.distributed.processes import ProcessInfo

HELP = "An empty line ends the chat; /reset forgets it, /save FILE appends it to a file of records."
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
RANGES = {
    "max_new_tokens": (1, None),
    "temperature": (0.0, None),
    "top_p": (0.0, 1.0),
    "top_k": (1, None),
    "seed": (0, 2**63 - 1),
    "threads": (1, None),
    "batch_size": (1, None),
    "tensor_parallel": (0, None),
    "draft": (0, None),
}
# Option, with its other spelling: arguments of `add_argument`, help.
FLAG: dict[str, Any] = {"action": "store_true"}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "--model": ({}, "folder, checkpoint, save_path or name on the HuggingFace hub; a run's newest result where absent"),
    "--prompt": ({}, "ask this and leave; an interactive chat where absent"),
    "--image": (
        {"action": "append", "metavar": "FILE", "default": []},
        "an image that the first question is about; may be repeated",
    ),
    "--input": ({"metavar": "TEXT"}, "what --prompt is about, as in records of instruct"),
    "--raw": (FLAG, "continue the prompt as a text, as in records of pretrain"),
    "--prompts-file": ({"metavar": "FILE"}, "ask each line, an object with a prompt or messages"),
    "--output": ({"metavar": "FILE"}, "the lines of --prompts-file with answers; continues such a file"),
    "--batch-size": ({"type": int, "metavar": "N"}, "prompts answered at once; default 8 a process"),
    "--adapter": ({"metavar": "DIR"}, "an adapter for --model: a run's, or a folder of peft's"),
    "--system": ({"metavar": "TEXT"}, "a system message before the first question"),
    "--reference": ({"metavar": "FILE"}, "a text to answer from, as in records of ref_qa"),
    "--tools": ({"metavar": "FILE"}, "tools that may be called, a JSON list as in records of chat; type the results"),
    "--max-new-tokens": ({"type": int, "metavar": "N", "default": 256}, "default 256"),
    "--greedy": (FLAG, "always take the likeliest token"),
    "--temperature": ({"type": float, "metavar": "T"}, "default 0.7; 0 is --greedy"),
    "--top-p": (
        {"type": float, "metavar": "P"},
        "sample from the likeliest tokens with this total probability; default 0.9",
    ),
    "--top-k": ({"type": int, "metavar": "K"}, "sample from the likeliest K tokens; default all"),
    "--repetition-penalty": ({"type": float, "metavar": "R", "default": 1.0}, "default 1, which is none"),
    "--seed": ({"type": int}, "the same seed gives the same answers"),
    "--stop": ({"action": "append", "metavar": "TEXT", "default": []}, "end an answer here; may be repeated"),
    "--draft": (
        {"type": int, "nargs": "?", "const": 0, "metavar": "N"},
        "let the model's layers that predict ahead draft N tokens a step; without N as many as there are layers",
    ),
    "--dtype": ({"choices": DTYPES}, "compute in this precision; as stored where absent"),
    "--tensor-parallel": (
        {"type": int, "nargs": "?", "const": 0, "metavar": "N"},
        "N processes share each layer of a stage; without N all of them do, in one stage",
    ),
    "--parts": (
        {"type": int, "nargs": "+", "metavar": "N"},
        "so many stages, or the layers of each; more processes are replicas, which share --prompts-file",
    ),
    "--threads": ({"type": int, "metavar": "N"}, "threads of each process; torch's choice where absent"),
    "--prompt-format": ({"metavar": "FORMAT"}, "chat_template, plain, gdgpt or a Jinja file, as in the config"),
    "--template-args": ({"metavar": "JSON"}, 'variables of a template, as in the config: {"enable_thinking": false}'),
    "--local_rank --local-rank": ({"type": int}, argparse.SUPPRESS),  # of DeepSpeed's and torch.distributed.launch
}


def make_parser() -> Parser:
    parser = Parser(prog=typed_name(), description="Talk to a model in either layout.")
    for names, (keys, text) in OPTIONS.items():
        parser.add_argument(*names.split(), help=text, **keys)
    return parser


def parse_arguments() -> argparse.Namespace:
    return make_parser().parse_args()


def open_demo(arguments: argparse.Namespace, process: ProcessInfo | None) -> None:
    """Answer in this process, or be one of the processes that a launcher started."""
    check(arguments)
    check_draft(arguments, process)
    if arguments.image:
        check_alone(arguments, bool(process and process.world_size > 1))
    import torch

    if arguments.model is None:
        if arguments.adapter:
            raise ConfigError("--adapter: expected it with --model, the folder of its base")
        from options.demo.chat_model import find_newest_result

        arguments.model = find_newest_result()
        if not process or process.rank == 0:
            notify(f"model: {arguments.model} (the newest of a run here; --model DIR for another)")

    dtype = getattr(torch, DTYPES[arguments.dtype]) if arguments.dtype else None
    if process and process.world_size > 1:
        from options.demo.stages import run_rank

        run_rank(arguments, dtype, process, partial(talk, arguments, dtype))
        return
    for name in ("tensor_parallel", "parts"):
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"{_option(name)}: without effect in one process; expected deepspeed --num_gpus N demo.py"
            )
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    talk(arguments, dtype)


def talk(arguments: argparse.Namespace, dtype: torch.dtype | None, model: Passes | None = None) -> None:
    """Answer one prompt, a file of prompts, or a chat.

    Args:
        model: to ask instead of loading the folder's.
    """
    from data.chat.messages import Said
    from data.images.in_records import has_images
    from data.prompt_texts import REFERENCE_TITLE
    from options.demo.chat import ChatSession, read_text, read_tools
    from options.demo.chat_model import AnswerOptions, ChatModel, find_trained_prompts, keys_of_run
    from options.demo.generation import GREEDY, Sampling
    from options.demo.pictures import trained_pixels
    from options.demo.prompts_file import answer_file, read_prompts
    from options.images.keys import KEY as VISION

    prompts = Prompts(arguments.prompt_format, template_args_of(arguments))
    trained = arguments.adapter or arguments.model
    if arguments.raw:  # of the format counts only what it puts before a text
        with suppress(DataError):
            found = find_trained_prompts(trained, ["prompt_format"], lambda line: None).get("prompt_format")
            prompts = Prompts(GDGPT if found == GDGPT else None)
    elif arguments.prompt_format != PLAIN:
        absent = [name for name in ("prompt_format", "template_args") if getattr(arguments, name) is None]
        prompts = replace(prompts, **find_trained_prompts(trained, absent, notify))
    pixels = None
    lines = read_prompts(Path(arguments.prompts_file)) if arguments.prompts_file else []
    if arguments.image or any(has_images(line) for _, line in lines):
        check_alone(arguments, model is not None)
        pixels = trained_pixels(keys_of_run(trained, [VISION])[1], notify)
    chat_model = ChatModel(arguments.model, prompts, dtype, model, arguments.adapter, arguments.draft, pixels)
    opening = [Said("system", arguments.system)] if arguments.system else []
    if arguments.reference:
        opening.append(Said("context", read_text(arguments.reference), name=REFERENCE_TITLE))
    names = ("temperature", "top_p", "top_k", "seed", "repetition_penalty")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    sampling = replace(GREEDY if arguments.greedy else Sampling(), **given)
    options = AnswerOptions(arguments.max_new_tokens, sampling, tuple(arguments.stop))
    if arguments.prompts_file:
        files = Path(arguments.prompts_file), Path(arguments.output)
        answer_file(chat_model, options, *files, opening, arguments.batch_size, notify, arguments.raw)
    elif arguments.raw:
        show(chat_model.continue_text(arguments.prompt, options))
    else:
        tools = read_tools(arguments.tools) if arguments.tools else []
        chat = ChatSession(chat_model, options, notify, opening, tools, arguments.image)
        if arguments.prompt is None:
            converse(chat)
        else:
            if prompts.prompt_format == GDGPT and arguments.input is None and not arguments.reference:
                notify("question: as in records of conversation; for one of instruct give --input, which may be empty")
            show(chat.ask(arguments.prompt, arguments.input))
    if chat_model.drafter:
        notify(f"drafts: {chat_model.drafter.tally.describe()}")


def check(arguments: argparse.Namespace) -> None:
    """Raise a ConfigError for numbers out of range, and for options that have no effect together."""
    for name, (least, most) in RANGES.items():
        value = getattr(arguments, name)
        if value is not None and not (least <= value < inf and (most is None or value <= most)):
            expected = f"at least {least}" if most is None else f"{least} to {most}"
            raise ConfigError(f"{_option(name)}: expected {expected}, found {value}")
    if not 0 < arguments.repetition_penalty < inf:
        raise ConfigError(f"--repetition-penalty: expected a number above 0, found {arguments.repetition_penalty}")
    sampled = [name for name in ("top_p", "top_k", "seed") if getattr(arguments, name) is not None]
    if sampled and (arguments.greedy or arguments.temperature == 0):
        raise ConfigError(f"{_option(sampled[0])}: nothing is sampled with --greedy or --temperature 0")
    if arguments.prompt_format:
        check_prompt_format(arguments.prompt_format)
    template_args_of(arguments)
    if arguments.parts and min(arguments.parts) < 1:
        raise ConfigError(
            f"--parts: expected the number of stages, or the layers of each; found {min(arguments.parts)}"
        )
    one, many = arguments.prompt is not None, bool(arguments.prompts_file)
    if many and (one or not arguments.output):
        raise ConfigError("--prompts-file: expected it with --output and without --prompt")
    if not many and (arguments.output or arguments.batch_size):
        raise ConfigError("--output and --batch-size: expected them with --prompts-file")
    if many and (own := [name for name in ("tools", "image") if getattr(arguments, name)]):
        raise ConfigError(f"--{own[0]}: expected it without --prompts-file, whose lines have their own")
    if arguments.input is not None and not one:
        raise ConfigError("--input: expected it with --prompt; a line of --prompts-file has its own")
    if arguments.raw and not one and not many:
        raise ConfigError("--raw: continues one text; expected it with --prompt or --prompts-file")
    around = ("image", "input", "system", "reference", "tools", "prompt_format", "template_args")
    if arguments.raw and (given := [name for name in around if getattr(arguments, name)]):
        raise ConfigError(f"--raw: the text stands alone; expected no {_option(given[0])}")


def check_draft(arguments: argparse.Namespace, process: ProcessInfo | None) -> None:
    """Raise a ConfigError where `--draft` has something beside it that answers several prompts, or in processes."""
    if arguments.draft is None:
        return
    if process and process.world_size > 1:
        raise ConfigError("--draft: needs the whole model in one process; expected python demo.py")
    if arguments.batch_size:
        raise ConfigError("--batch-size: --draft answers one prompt after the other; expected one of them")


def check_alone(arguments: argparse.Namespace, divided: bool) -> None:
    """Raise a ConfigError for images where the model is divided, or drafts."""
    if divided or arguments.draft is not None:
        raise ConfigError("images: need the whole model in one process, which drafts nothing; expected python demo.py")


def template_args_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Parse the variables of a chat template."""
    try:
        return TypeAdapter(TemplateArguments).validate_json(arguments.template_args or "{}")
    except ValidationError as error:
        reason = in_our_words(error.errors()[0]["msg"])
        raise ConfigError(f"--template-args: {reason}") from None


def converse(chat: ChatSession) -> None:
    """Answer what is typed, until an empty line or the end of the input."""
    print(HELP)
    if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no text are refused as a question; the chat goes on
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        if not text:
            return
        try:
            handle(chat, text)
        except DataError as error:  # the next question may be a better one
            notify(f"error: {error}")


def handle(chat: ChatSession, text: str) -> None:
    """Run a command, or answer a question."""
    word, _, rest = text.partition(" ")
    if text == "/reset":
        chat.reset()
    elif word == "/save" and rest:
        chat.save(Path(rest.strip()))
    elif text.startswith("/"):
        notify(f"{word}: expected /reset or /save FILE")
    else:
        show(chat.ask(text))


def show(pieces: Iterable[str]) -> None:
    """Print an answer while it is written."""
    for piece in pieces:
        print(safe_text(piece), end="", flush=True)
    print()


def notify(line: str) -> None:
    """Print a line that is no part of an answer to standard error."""
    print(safe_line(line), file=sys.stderr, flush=True)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
