"""Samples as one HTML page that can be shared: supervised tokens in colour, each token's boundaries and id on hover.

The page holds everything it needs. It runs no script, loads nothing, and follows the reader's light or dark setting.
What the samples say is escaped, so a record cannot put anything into the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.errors import DataError
from data.inspection.inspect import Piece, pieces, summary
from data.tokenized.tokenize import Sample

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
h2 {{ font-size: 1rem; margin: 2rem 0 .5rem; }}
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
<p><b>Supervised</b>: bears loss. The rest is context. <i class="s">Dashed</i>: a control token of the model.
Point at a token for its number.</p>
{samples}
</body>
</html>
"""
SAMPLE = '<section>\n<h2>{summary}</h2>\n<pre lang="und" dir="auto">{tokens}</pre>\n</section>'


def write_page(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, path: str | Path, title: str) -> None:
    """Write samples as a page, replacing what is there.

    Raises:
        DataError: the file cannot be written.
    """
    sections = [
        SAMPLE.format(summary=summary(number, sample), tokens="".join(map(_token, pieces(sample, tokenizer))))
        for number, sample in enumerate(samples, start=1)
    ]
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
    # The end of a line is shown, or nobody would see whether it bears loss; a line feed at the beginning of <pre>
    # would be dropped, this one stands in a tag.
    text = escape(piece.text).replace("\r", "␍").replace("\n", "↵\n")
    return f'<{tag}{kind} title="{ids}">{text}</{tag}>'
