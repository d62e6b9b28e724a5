"""How a program ends that cannot go on: in one line, whatever happened.

A mistake that the user can mend is an error of the wings (`USER_ERRORS`): its text, and exit code 2. Whatever nobody
foresaw is told with its type, and the traceback goes to a file that the line names: exit code 1. The line ends with the
page that explains more. Ctrl-C: 130.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from common.terminal import guard_logging, safe_line
from data.errors import DataError
from models.errors import CheckpointError


class ConfigError(ValueError):
    """A YAML file, a command line or the set of started processes does not make a run."""


class RunRefused(Exception):
    """Some rank cannot go on; every rank raises it with the same text, so that all leave together."""


# Each argument of one is a line; several are for several bad records.
USER_ERRORS = (ConfigError, DataError, CheckpointError)
EXIT_CODE, INTERRUPTED = 2, 130
RANK_0_SPEAKS = 20.0  # seconds for rank 0 to find the same mistake as another rank
LEAVING = 2.0  # seconds for rank 0 to say what all know
TOO_MANY_FILES = "Too many open files"  # as the C library says it, and torch after it
NOT_ORDERED = " does not have a deterministic implementation"  # as torch says it, behind the operation's name

_traceback_folder: str | None = None


def keep_tracebacks_in(folder: str) -> None:
    """From now on tracebacks go there, where that is a folder that can be written, instead of to the temporary one."""
    global _traceback_folder  # noqa: PLW0603  # where it fails, nothing but the error is at hand
    _traceback_folder = folder


def ending(error: BaseException) -> tuple[int, str]:
    """The exit code and the line, safe for a terminal, with which an error ends a program; writes the traceback."""
    code, line, report = description(error)
    return code, with_traceback(line, report)


def description(error: BaseException) -> tuple[int, str, str]:
    """The exit code, the line, and the traceback where the error is none that a user can mend."""
    if isinstance(error, (*USER_ERRORS, RunRefused)):
        return EXIT_CODE, "\n".join(safe_line(str(line)) for line in error.args), ""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted", ""
    if TOO_MANY_FILES in str(error):
        return EXIT_CODE, f"{safe_line(str(error))}: the limit of open files is too low; raise it with ulimit -n", ""
    if NOT_ORDERED in str(error):
        operation = safe_line(str(error).partition(NOT_ORDERED)[0])
        return EXIT_CODE, f"deterministic: torch has no {operation} that sums in the same order; expected false", ""
    first = next(iter(str(error).strip().splitlines()), "")
    told = safe_line(f"{type(error).__name__}: {first}" if first else type(error).__name__)
    return 1, told, "".join(traceback.format_exception(error))


def with_traceback(line: str, report: str) -> str:
    """The line with the file in which a traceback now is, where there is one."""
    return f"{line}; {_written(report)}" if report else line


def _written(report: str) -> str:
    for folder in (_traceback_folder, None):  # None: the system's temporary folder
        with suppress(OSError):
            if folder is None or os.path.isdir(folder):
                file, path = tempfile.mkstemp(prefix="traceback-", suffix=".txt", dir=folder)
                with open(file, "w", encoding="utf-8", errors="backslashreplace") as stream:
                    stream.write(report)
                return f"the full traceback is in {safe_line(os.path.abspath(path))}"
    return "its traceback is lost, as no file can be written"


def _page(error: BaseException, of_config: str) -> str:
    """The end of the line, with the page that explains more; nothing where nothing is wrong."""
    if isinstance(error, KeyboardInterrupt):
        return ""
    of_model = of_config if of_config == "docs/conversion.md" else "docs/troubleshooting.md"
    if "config.json: " in str(error):  # which family it is of, and what that can have
        of_model = "docs/models.md"
    pages = {ConfigError: of_config, DataError: "docs/data.md", CheckpointError: of_model}
    found = (page for kind, page in pages.items() if isinstance(error, kind))
    return f" (see {next(found, 'docs/troubleshooting.md')})"


def tell(line: str) -> None:
    """Print to where the launcher printed, which may be gone as well."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def one_line_at_the_end(
    rank: int | None = None, goes_on: bool = False, page: str = "docs/configuration.md"
) -> Iterator[None]:
    """What a door does around everything: an error becomes one line on standard error, and the exit code.

    Args:
        rank: of this process in a run, if it is one. What all ranks know one says, and a rank ends here, without
            Python's own teardown: threads of the process group may still be under way, and would now and then abort a
            run that is done ("terminate called without an active exception").
        goes_on: whether the program has more to do where all went well.
        page: explains what the program is asked with.
    """
    code: Any = 0
    guard_logging()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        code, line = ending(error)
        if rank and code == EXIT_CODE:
            # A launcher ends all ranks as soon as one has left: the one that speaks must be the first.
            time.sleep(LEAVING if isinstance(error, RunRefused) else RANK_0_SPEAKS)
        if not rank or not isinstance(error, (RunRefused, KeyboardInterrupt)):
            print(f"error: {line}{_page(error, page)}", file=sys.stderr, flush=True)
    except SystemExit as leaving:
        code = leaving.code
    if rank is not None and (code or not goes_on):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    if code:
        sys.exit(code)
