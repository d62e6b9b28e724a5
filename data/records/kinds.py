"""Files that hold no records, named for what they are: by the marks that they begin with."""

from __future__ import annotations

import re

ARCHIVE = "expected it unpacked"
MARKS: dict[bytes | tuple[bytes, ...], tuple[str, str]] = {
    b"PK\x03\x04": ("a zip archive", ARCHIVE),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", ARCHIVE),
    b"Rar!": ("a rar archive", ARCHIVE),
    b"BZh": ("compressed by bzip2", "expected it unpacked, or gzip or zstd"),
    b"\xfd7zXZ\0": ("compressed by xz", "expected it unpacked, or gzip or zstd"),
    b"\xd0\xcf\x11\xe0": ("an old Office document", "expected a spreadsheet saved as CSV in UTF-8"),
    (b"\x89PNG", b"\xff\xd8\xff", b"GIF8"): ("an image", "expected records"),
    b"%PDF": ("a PDF", "expected its text"),
    (b"\x80\x02", b"\x80\x04", b"\x80\x05"): ("a pickle, which is never opened", "expected JSON, CSV or Parquet"),
    b"SQLite format 3": ("a database", "expected a table of it saved as CSV in UTF-8"),
    b"version https://git-lfs": ("a pointer of Git LFS, not the file", "expected it after git lfs pull"),
}
SPREADSHEET, OFFICE = b"xl/", b"[Content_Types].xml"
TAR = (257, b"ustar")
HTML = re.compile(rb"\s*<(!doctype html|html|head|body)\b", re.IGNORECASE)
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
LOOKED_AT = 200  # bytes: in UTF-16, of most texts every other one is NUL
NAN = re.compile(rb'"(\w+)"\s*:\s*(?:\[\s*)?(-?(?:NaN|Infinity))\b')


def foreign(head: bytes, named_text: bool) -> str | None:
    """What a file is that holds no records, and what is expected instead; None where it may hold some.

    Args:
        head: its first bytes.
        named_text: whether it is named as plain text, which may be about anything.
    """
    if head.startswith(b"PK\x03\x04") and (SPREADSHEET in head or OFFICE in head):
        return "is a spreadsheet or another Office document; expected it saved as CSV in UTF-8"
    found = next((told for mark, told in MARKS.items() if head.startswith(mark)), None)
    if found is None and head[TAR[0] :].startswith(TAR[1]):
        found = "a tar archive", ARCHIVE
    if found is None and not named_text and HTML.match(head):
        found = "an HTML page", "expected the file itself, by its link for downloading"
    if found:
        return f"is {found[0]}; {found[1]}"
    pairs = head[:LOOKED_AT]
    even, odd = pairs[::2], pairs[1::2]
    wide = (all(even) and not any(odd)) or (all(odd) and not any(even))
    if (len(pairs) >= 4 and wide) or (head.startswith(UTF16_MARKS) and b"\0" in head):
        return "is in UTF-16; expected UTF-8"
    return None


def not_a_number(text: bytes) -> str | None:
    """The complaint about a NaN or an infinity in JSON that cannot be parsed, if there is one."""
    found = NAN.search(text)
    if found is None:
        return None
    return f"field {found[1].decode()}: {found[2].decode()} is no JSON; expected a number or null"
