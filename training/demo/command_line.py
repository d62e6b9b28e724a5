"""What demo.py does with its command line.

torch and all that takes seconds to import is imported once the words are checked: a mistake is told at once.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from common.terminal import safe_line, safe_text
from data.chat.prompts import PLAIN, Prompts, TemplateArguments, check_prompt_format
from data.errors import DataError
from training.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from data.chat.messages import Said
    from models.generation import Passes
    from training.demo.chat import Chat
    from training.demo.speaker import Speaker, Wishes
    from training.demo.tools import Tools
    from training.distributed.processes import Place

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
}


def parse_arguments() -> argparse.Namespace:
    """The words after demo.py."""
    parser = argparse.ArgumentParser(description="Talk to a model in either layout.")
    parser.add_argument("--model", required=True, help="model folder, checkpoint or a run's save_path")
    parser.add_argument("--prompt", help="ask this and leave; an interactive chat where absent")
    parser.add_argument("--input", metavar="TEXT", help="of --prompt: what it is about, as in records of instruct")
    parser.add_argument(
        "--raw", action="store_true", help="the prompt is a text to go on with, as in records of pretrain"
    )
    parser.add_argument("--prompts-file", metavar="FILE", help="ask each line, an object with a prompt or messages")
    parser.add_argument(
        "--output", metavar="FILE", help="of --prompts-file: the same lines with answers; goes on there"
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="of --prompts-file: answered at once; default 8 a process"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the first question")
    parser.add_argument("--reference", metavar="FILE", help="a text that the answers rest on, as in records of ref_qa")
    parser.add_argument("--tools", metavar="FILE", help="tools that may be called: a JSON list, as in records of chat")
    parser.add_argument("--api-desc", metavar="FILE", help="the same as a text, as in records of conver_has_api")
    parser.add_argument("--api-results", metavar="FILE", help="an object: the results of calls by the tools' names")
    parser.add_argument("--api-command", metavar="COMMAND", help="gets a call as JSON on its input, prints the result")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default %(default)s")
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    parser.add_argument("--temperature", type=float, metavar="T", help="default 0.7; 0 is --greedy")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample from this much of the probability; default 0.9"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the likeliest K tokens; default all")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="1 is none, the default")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answers")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end an answer here; may be repeated"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="compute in this precision; as stored where absent")
    parser.add_argument(
        "--tensor-parallel", action="store_true", help="processes share each layer out, instead of all layers"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of each process; torch's choice where absent")
    parser.add_argument(
        "--prompt-format", metavar="FORMAT", help="chat_template, plain or a Jinja file, as in the training config"
    )
    parser.add_argument(
        "--template-args", metavar="JSON", help='what a template gets, as in the config: {"enable_thinking": false}'
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return parser.parse_args()


def open_demo(arguments: argparse.Namespace, place: Place | None) -> None:
    """Answer in this process, or be one of those that a launcher started.

    Raises:
        ConfigError: the words make no sense together.
    """
    check(arguments)
    import torch

    dtype = getattr(torch, DTYPES[arguments.dtype]) if arguments.dtype else None
    if place and place.world_size > 1:
        from training.demo.stages import in_processes

        in_processes(arguments, dtype, place, partial(talk, arguments, dtype))
        return
    if arguments.tensor_parallel:
        raise ConfigError("--tensor-parallel: without effect in one process; expected deepspeed --num_gpus N demo.py")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    talk(arguments, dtype)


def talk(arguments: argparse.Namespace, dtype: torch.dtype | None, model: Passes | None = None) -> None:
    """Answer one prompt, those of a file, or as many as are typed.

    Args:
        model: to be loaded where absent.
    """
    from training.demo.chat import Chat
    from training.demo.prompts_file import answer_all
    from training.demo.speaker import Speaker
    from training.demo.trained import as_trained

    prompts = Prompts(arguments.prompt_format, template_args_of(arguments))
    if not arguments.raw and arguments.prompt_format != PLAIN:
        absent = [name for name in ("prompt_format", "template_args") if getattr(arguments, name) is None]
        prompts = replace(prompts, **as_trained(arguments.model, absent, tell))
    speaker = Speaker(arguments.model, prompts, dtype, model)
    opening, tools = opening_of(arguments, speaker)
    wishes = wishes_of(arguments)
    if arguments.prompts_file:
        files = Path(arguments.prompts_file), Path(arguments.output)
        answer_all(speaker, wishes, *files, opening, arguments.batch_size, tell, arguments.raw)
    elif arguments.raw:
        show(speaker.continued(arguments.prompt, wishes))
    elif arguments.prompt is not None:
        show(Chat(speaker, wishes, tell, opening, tools).ask(arguments.prompt, arguments.input or ""))
    else:
        converse(Chat(speaker, wishes, tell, opening, tools))


def check(arguments: argparse.Namespace) -> None:
    """Refuse numbers out of their range, and what would be ignored.

    Raises:
        ConfigError: in one line, what was expected.
    """
    for name, (least, most) in RANGES.items():
        value = getattr(arguments, name)
        if value is not None and not (least <= value < inf and (most is None or value <= most)):
            expected = f"at least {least}" if most is None else f"{least} to {most}"
            raise ConfigError(f"{_option(name)}: expected {expected}, found {value}")
    if not 0 < arguments.repetition_penalty < float("inf"):
        raise ConfigError(f"--repetition-penalty: expected a number above 0, found {arguments.repetition_penalty}")
    drawn = [name for name in ("top_p", "top_k", "seed") if getattr(arguments, name) is not None]
    drawn += ["temperature"] if arguments.temperature else []
    if drawn and (arguments.greedy or arguments.temperature == 0):
        raise ConfigError(f"{_option(drawn[0])}: nothing is drawn; expected it without --greedy and --temperature 0")
    if "" in arguments.stop:
        raise ConfigError("--stop: expected a text, found an empty one")
    if arguments.prompt_format:
        check_prompt_format(arguments.prompt_format)
    template_args_of(arguments)
    check_together(arguments)


def template_args_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a chat template gets beside the messages.

    Raises:
        ConfigError: it is no JSON object, or holds what Pipetune gives.
    """
    try:
        return TypeAdapter(TemplateArguments).validate_json(arguments.template_args or "{}")
    except ValidationError as error:
        reason = error.errors()[0]["msg"].replace("Input should be", "expected")
        raise ConfigError(f"--template-args: {reason}") from None


def check_together(arguments: argparse.Namespace) -> None:
    """Refuse options that one of the others leaves without effect.

    Raises:
        ConfigError: in one line, which and why.
    """
    if arguments.prompts_file and (arguments.prompt is not None or not arguments.output):
        raise ConfigError("--prompts-file: expected it with --output and without --prompt")
    if arguments.input is not None and arguments.prompt is None:
        raise ConfigError("--input: expected it with --prompt; a line of --prompts-file has its own")
    if arguments.raw and arguments.prompt is None and not arguments.prompts_file:
        raise ConfigError("--raw: goes on with one text; expected it with --prompt or --prompts-file")
    around = ("input", "system", "reference", "tools", "api_desc", "prompt_format", "template_args")
    if arguments.raw and (given := [name for name in around if getattr(arguments, name)]):
        raise ConfigError(f"--raw: nothing stands around the text; expected it without {_option(given[0])}")
    if arguments.template_args is not None and arguments.prompt_format == PLAIN:
        raise ConfigError("--template-args: a chat template gets them; expected it without --prompt-format plain")
    if not arguments.prompts_file and (arguments.output or arguments.batch_size):
        raise ConfigError("--output and --batch-size: expected them with --prompts-file")
    if sum(map(bool, (arguments.reference, arguments.tools, arguments.api_desc))) > 1:
        raise ConfigError("--reference, --tools and --api-desc: expected one of them")
    calling = bool(arguments.tools or arguments.api_desc)
    if arguments.prompts_file and calling:
        raise ConfigError("--prompts-file: no results are asked for; expected it without --tools and --api-desc")
    if (arguments.api_results or arguments.api_command) and not calling:
        raise ConfigError("--api-results and --api-command: expected them with --tools or --api-desc")
    if arguments.api_results and arguments.api_command:
        raise ConfigError("--api-results and --api-command: expected one of them")


def wishes_of(arguments: argparse.Namespace) -> Wishes:
    """How answers are to be."""
    from models.generation import GREEDY, Sampling
    from training.demo.speaker import Wishes

    names = ("temperature", "top_p", "top_k", "seed", "repetition_penalty")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    sampling = replace(GREEDY if arguments.greedy else Sampling(), **given)
    return Wishes(arguments.max_new_tokens, sampling, tuple(arguments.stop))


def opening_of(arguments: argparse.Namespace, speaker: Speaker) -> tuple[list[Said], Tools | None]:
    """What stands before the first question, and what may be called.

    Raises:
        DataError: a file cannot be used.
    """
    from data.chat.fallbacks import describe
    from data.chat.messages import Said
    from data.prompt_texts import API_TITLE, REFERENCE_TITLE
    from training.demo.tools import Tools, results_of_command, results_of_file, results_typed, schemas_in, text_of

    opening = [Said("system", arguments.system)] if arguments.system else []
    if arguments.reference:
        opening.append(Said("context", text_of(arguments.reference), name=REFERENCE_TITLE))
    if not arguments.tools and not arguments.api_desc:
        return opening, None
    schemas = schemas_in(arguments.tools) if arguments.tools else []
    form = speaker.call_form() if schemas else None
    if form is None:
        text = describe(schemas) if schemas else text_of(arguments.api_desc)
        opening.append(Said("context", text, name=API_TITLE))
    if arguments.api_results:
        return opening, Tools(schemas if form else [], form, results_of_file(arguments.api_results))
    result = results_of_command(arguments.api_command) if arguments.api_command else results_typed
    return opening, Tools(schemas if form else [], form, result)


def converse(chat: Chat) -> None:
    """Ask what is typed, until an empty line or the end of the input."""
    print(HELP)
    if isinstance(sys.stdin, io.TextIOWrapper):  # what is no text is refused as a question, and the chat goes on
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
            obey(chat, text)
        except DataError as error:  # the next question may be a better one
            tell(f"error: {error}")


def obey(chat: Chat, text: str) -> None:
    """Do what was typed: a command, or a question."""
    word, _, rest = text.partition(" ")
    if text == "/reset":
        chat.reset()
    elif word == "/save" and rest:
        chat.save(Path(rest.strip()))
    elif text.startswith("/"):
        tell(f"{word}: expected /reset or /save FILE")
    else:
        show(chat.ask(text))


def show(pieces: Iterable[str]) -> None:
    """Print an answer while it comes."""
    for piece in pieces:
        print(safe_text(piece), end="", flush=True)
    print()


def tell(line: str) -> None:
    """What is no part of an answer goes to standard error."""
    print(safe_line(line), file=sys.stderr, flush=True)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
