"""Talk to a model in either layout: a HuggingFace folder, a pipeline folder, a run's checkpoint.

    python demo.py --model DIR --prompt TEXT [--max-new-tokens N] [--greedy]
    python demo.py --model DIR          an interactive chat

A model is asked with the prompts it was trained with.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from common.terminal import safe_text
from data.chat.messages import Said
from data.chat.prompts import PromptFormat, check_prompt_format
from training.errors import one_line_at_the_end

if TYPE_CHECKING:
    from models.generation.sampling import Sampling


class Chat:
    """A dialogue with a model; it remembers the turns so far."""

    def __init__(self, folder: str | Path, prompt_format: PromptFormat | None = None) -> None:
        import torch  # takes seconds, as do the others: --help does without

        from data.chat.native_tokenizers import end_tokens
        from data.tokenized.tokenize import load_tokenizer
        from models import load_model
        from models.checkpoint.layout import resolve
        from models.generation.generate import stop_ids

        self.prompt_format = check_prompt_format(prompt_format) if prompt_format else None
        resolved = resolve(folder)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = load_model(resolved, device=device)
        self.tokenizer = load_tokenizer(resolved)
        self.stop = stop_ids(resolved) | end_tokens(self.tokenizer)
        self.said: tuple[Said, ...] = ()

    def ask(self, text: str, max_new_tokens: int, sampling: Sampling) -> Iterator[str]:
        """Yield the answer in pieces as it is written, and remember it."""
        from data.tokenized.tokenize import encode_question
        from models.generation.generate import generate

        asked = (*self.said, Said("user", text))
        prompt = encode_question(asked, self.tokenizer, self.prompt_format)
        ids: list[int] = []
        answer = ""
        for token in generate(self.model, prompt, max_new_tokens, self.stop, sampling):
            ids.append(token)
            longer = self.tokenizer.decode(ids).lstrip()  # ChatGLM3 begins on a new line, which its prompt writes too
            if not longer.endswith("\ufffd"):  # the middle of a character of several tokens
                yield longer[len(answer) :]
                answer = longer
        self.said = (*asked, Said("assistant", answer))


def main() -> None:
    arguments = parse_arguments()
    with one_line_at_the_end():
        from models.generation.sampling import GREEDY, Sampling

        sampling = GREEDY if arguments.greedy else Sampling()
        chat = Chat(arguments.model, arguments.prompt_format)
        if arguments.prompt is not None:
            say(chat, arguments.prompt, arguments.max_new_tokens, sampling)
        else:
            converse(chat, arguments.max_new_tokens, sampling)


def say(chat: Chat, text: str, max_new_tokens: int, sampling: Sampling) -> None:
    """Ask once and print the answer while it comes."""
    for piece in chat.ask(text, max_new_tokens, sampling):
        print(safe_text(piece), end="", flush=True)
    print()


def converse(chat: Chat, max_new_tokens: int, sampling: Sampling) -> None:
    """Ask what is typed, until an empty line or the end of the input."""
    print("An empty line ends the chat.")
    while True:
        try:
            text = input("> ").strip()
            if not text:
                return
            say(chat, text, max_new_tokens, sampling)
        except EOFError:
            print()
            return


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Talk to a model in either layout.")
    parser.add_argument("--model", required=True, help="model folder, checkpoint or a run's save_path")
    parser.add_argument("--prompt", help="ask this and leave; an interactive chat where absent")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    parser.add_argument(
        "--prompt-format", metavar="FORMAT", help="chat_template, plain or a Jinja file, as in the training config"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
