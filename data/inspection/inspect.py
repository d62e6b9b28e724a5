"""Show samples as the model gets them: trained tokens in colour, or between marks without colour.

The text is put together from the tokens themselves, so the coloured text is exactly the trained tokens.

`write_page` makes one HTML page that can be shared, with each token's boundaries, and its id on hover. The page holds
everything it needs. It runs no script, loads nothing, and follows the reader's light or dark setting. What the samples
say is escaped, so a record cannot put anything into the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import chain, groupby, zip_longest
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from common.terminal import safe_text
from data.errors import DataError
from data.sample_set import IGNORED, Sample
from data.tokenized.dataset import Dataset

MARKS = "\u27e6", "\u27e7"  # white square brackets
TURN_ENDS = "\u2502"  # a vertical line
PAGE = """<!DOCTYPE html>
<html>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: light-dark(#222, #ddd); background: light-dark(#fff, #16181c); }}
h2, h3 {{ font-size: 1rem; margin: 2rem 0 .5rem; }}
pre {{ font: 13px/1.7 ui-monospace, Menlo, Consolas, "Noto Sans Mono CJK SC", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 0; padding: .8rem;
  border: 1px solid light-dark(#ddd, #3a3d44); border-radius: 6px; }}
b, i {{ font: inherit; font-style: normal; box-shadow: inset 1px 0 light-dark(#0001, #fff2); }}
b {{ color: light-dark(#0a5c2b, #8ee6ae); background: light-dark(#d9f5e3, #12351f); }}
.s {{ font-style: italic; border: 1px dashed; border-radius: 3px; }}
b:hover, i:hover {{ outline: 1px solid currentColor; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p><b>Supervised</b>: trained. The rest is context. <i class="s">Dashed</i>: a control token of the model.
Point at a token for its number.</p>
{samples}
</body>
</html>
"""
SAMPLE = "<section>\n<h2>{summary}</h2>\n{documents}\n</section>"
DOCUMENT = '{name}<pre lang="und" dir="auto">{tokens}</pre>'
SUPERVISED_STYLE = "bold green"
MAX_TOKENS = 400  # tokens at either end of a sample on a terminal; a page holds all of them
CUT = "\ufffd"  # what a tokenizer writes for part of a character
LONGEST_CHARACTER = 4  # bytes, and so tokens


class Piece(NamedTuple):
    """Hold the fewest tokens that make whole characters, most often one."""

    text: str
    ids: tuple[int, ...]
    supervised: bool
    special: bool  # a control token of the model, not text


def choose_samples(dataset: Dataset, count: int) -> list[int]:
    """Choose the first samples, and the first one of each type of record that these do not hold."""
    first = {int(dataset.of_type(name).argmax()) for name in dataset.types}
    return sorted(first | {*range(min(count, len(dataset)))})


def summary(number: int, sample: Sample) -> str:
    """Count the tokens of a sample's documents in one line."""
    counts = []
    for name, document in documents(sample):
        supervised = sum(int(label != IGNORED) for label in document["labels"])
        length = len(document["input_ids"])
        of_one = f"{length} tokens, {supervised} supervised ({supervised / length:.0%})"
        counts.append(f"{name} {of_one}" if name else of_one)
    value = sample.get("value", 0.0)  # of preferences, where it is not 0
    return f"sample {number}: {'; '.join(counts)}{f'; value {value:g}' if value else ''}"


def documents(sample: Sample) -> list[tuple[str, Sample]]:
    """Return a pair's two documents with their names, any other sample as it is, without a name."""
    if not (first := sample.get("first", 0)):
        return [("", sample)]
    ids, labels = sample["input_ids"], sample["labels"]
    return [
        ("chosen", {"input_ids": ids[:first], "labels": labels[:first]}),
        ("rejected", {"input_ids": ids[first:], "labels": labels[first:]}),
    ]


def show_samples(
    samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, console: Console, origins: Sequence[str] = ()
) -> None:
    """Print samples, one after the other, with a line that counts their tokens and says where each is from."""
    for number, (sample, origin) in enumerate(zip_longest(samples, origins), start=1):
        console.rule(summary(number, sample))
        if origin:
            console.print(origin, highlight=False, soft_wrap=True)
        for name, document in documents(sample):
            if name:
                console.rule(name, align="left", characters="-")
            console.print(coloured(document, tokenizer, _without_colour(console)), soft_wrap=True)
    begin, end = MARKS if _without_colour(console) else ("", "")
    legend = f": trained; the rest is context; {TURN_ENDS} a turn ends"
    console.rule(Text.assemble((f"{begin}supervised{end}", SUPERVISED_STYLE), legend))


def coloured(sample: Sample, tokenizer: PreTrainedTokenizerBase, marked: bool = False) -> Text:
    """Return a sample's text; a long one is cut to its beginning and end.

    Args:
        marked: put trained text between marks, too.
    """
    text = Text()
    begin, end = MARKS if marked else ("", "")
    whole = _with_turn_ends(folded(pieces(sample, tokenizer)))
    if middle := whole[MAX_TOKENS:-MAX_TOKENS]:
        count = sum(len(piece.ids) for piece in middle)
        whole[MAX_TOKENS:-MAX_TOKENS] = [Piece(f"\n[... {count:,} tokens are not shown ...]\n", (), False, False)]
    for supervised, run in groupby(whole, key=lambda piece: piece.supervised):
        words = safe_text("".join(piece.text for piece in run))
        text.append(f"{begin}{words}{end}" if supervised else words, style=SUPERVISED_STYLE if supervised else "")
    return text


def folded(whole: Sequence[Piece]) -> list[Piece]:
    """Show a control token that repeats, as that of an image does by the hundred, once with its count."""
    shown: list[Piece] = []
    for _, run in groupby(whole, key=lambda piece: (piece.special, piece.supervised, piece.text)):
        same = list(run)
        if same[0].special and len(same) > 2:
            ids = tuple(chain.from_iterable(piece.ids for piece in same))
            same = [same[0]._replace(text=f"{same[0].text} x {len(same)} ", ids=ids)]
        shown += same
    return shown


def _with_turn_ends(whole: Sequence[Piece]) -> list[Piece]:
    """Put a line behind each control token that ends a turn: the last one of any trained run, wherever it stands."""
    ends = set()
    for trained, run in groupby(whole, key=lambda piece: piece.supervised):
        special = [piece.ids for piece in run if piece.special]
        if trained and special:
            ends.add(special[-1])
    border = Piece(TURN_ENDS, (), False, False)
    shown = []
    for piece in whole:
        shown.append(piece)
        if piece.ids in ends:
            shown.append(border)
    return shown


def _without_colour(console: Console) -> bool:
    return console.no_color or console.color_system is None


def pieces(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """Cut a sample into its tokens, each with the text that it adds."""
    added = tokenizer.added_tokens_decoder
    special = {number for number, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    done: list[Piece] = []
    ids = [int(token) for token in sample["input_ids"]]  # a list, or an array where the samples were stored
    loss = [label != IGNORED for label in sample["labels"]]
    start = 0
    while start < len(ids):
        # Tokenizers drop a blank at the beginning of a text, so a token is decoded behind the one before it.
        before = list(done[-1].ids) if done else []
        known = len(_decode(before, tokenizer))
        end = start
        while True:
            end += 1
            text = _decode(before + ids[start:end], tokenizer)[known:]
            whole = not text.endswith(CUT) or end - start == LONGEST_CHARACTER
            if whole or end == len(ids) or loss[end] != loss[start]:
                break
        done.append(Piece(text, tuple(ids[start:end]), loss[start], ids[start] in special))
        start = end
    return done


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) if ids else ""


def write_page(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, path: str | Path, title: str) -> None:
    """Write samples as a page, replacing what is there.

    Raises:
        DataError: the file cannot be written.
    """
    sections = []
    for number, sample in enumerate(samples, start=1):
        shown = []
        for name, document in documents(sample):
            tokens = "".join(map(_token, pieces(document, tokenizer)))
            shown.append(DOCUMENT.format(name=f"<h3>{name}</h3>\n" if name else "", tokens=tokens))
        sections.append(SAMPLE.format(summary=summary(number, sample), documents="\n".join(shown)))
    page = PAGE.format(title=escape(title), samples="\n".join(sections))
    try:
        # A lone surrogate, which JSON can hold, cannot be written.
        Path(path).write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None


def _token(piece: Piece) -> str:
    tag = "b" if piece.supervised else "i"
    ids = " ".join(map(str, piece.ids))
    kind = ' class="s"' if piece.special else ""
    # The end of a line is shown, or nobody would see whether it is trained; a line feed at the beginning of <pre>
    # would be dropped, this one stands in a tag.
    text = escape(piece.text).replace("\r", "␍").replace("\n", "↵\n")
    return f'<{tag}{kind} title="{ids}">{text}</{tag}>'
