"""End a program with one line and an exit code, whatever happened.

A mistake that the user can fix (`USER_ERRORS`) prints its own text; exit code 2. Any other error prints its type and
text, and the file that has the traceback; exit code 1. The line ends with the page of the docs. Ctrl-C: 130.
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
    """The YAML file, the command line or the number of started processes is wrong. Each argument is a line."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class RunRefused(Exception):
    """Some rank cannot continue; every rank raises it with the same text, so that all exit together."""


# Each argument is a line; several are for several bad records.
USER_ERRORS = (ConfigError, DataError, CheckpointError)
EXIT_CODE, INTERRUPTED = 2, 130
RANK_0_SPEAKS = 20.0  # seconds for rank 0 to find the same mistake as another rank
RANK_0_PRINTS = 2.0  # seconds for rank 0 to print an error that all ranks have
TOO_MANY_FILES = "Too many open files"  # text of the C library, which torch repeats
NOT_DETERMINISTIC = " does not have a deterministic implementation"  # torch's text, behind the operation's name

_traceback_folder: str | None = None


def keep_tracebacks_in(folder: str) -> None:
    """Write later tracebacks to this folder; to the temporary one if it is missing or cannot be written."""
    global _traceback_folder  # noqa: PLW0603  # an error handler has nothing but the error
    _traceback_folder = folder


def describe_and_save(error: BaseException) -> tuple[int, str]:
    """Return an error's exit code and its line, safe for a terminal; save its traceback."""
    code, line, report = describe_error(error)
    return code, with_traceback(line, report)


def describe_error(error: BaseException) -> tuple[int, str, str]:
    """Return an error's exit code, its line, and its traceback unless the user can fix it."""
    if isinstance(error, (*USER_ERRORS, RunRefused)):
        return EXIT_CODE, "\n".join(safe_line(str(line)) for line in error.args), ""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted", ""
    if TOO_MANY_FILES in str(error):
        return EXIT_CODE, f"{safe_line(str(error))}: the limit of open files is too low; raise it with ulimit -n", ""
    if NOT_DETERMINISTIC in str(error):
        operation = safe_line(str(error).partition(NOT_DETERMINISTIC)[0])
        return EXIT_CODE, f"deterministic: torch has no {operation} that sums in the same order; expected false", ""
    first = next(iter(str(error).strip().splitlines()), "")
    line = safe_line(f"{type(error).__name__}: {first}" if first else type(error).__name__)
    return 1, line, "".join(traceback.format_exception(error))


def with_traceback(line: str, report: str) -> str:
    """Save a traceback, if there is one, and append its file to the line."""
    return f"{line}; {_save(report)}" if report else line


def _save(report: str) -> str:
    for folder in (_traceback_folder, None):  # None: the system's temporary folder
        with suppress(OSError):
            if folder is None or os.path.isdir(folder):
                file, path = tempfile.mkstemp(prefix="traceback-", suffix=".txt", dir=folder)
                with open(file, "w", encoding="utf-8", errors="backslashreplace") as stream:
                    stream.write(report)
                return f"the full traceback is in {safe_line(os.path.abspath(path))}"
    return "its traceback is lost, as no file can be written"


def _help_page(error: BaseException, config_page: str) -> str:
    """Return the end of the line, which names the page that explains the error."""
    if isinstance(error, KeyboardInterrupt):
        return ""
    model_page = config_page if config_page == "docs/conversion.md" else "docs/troubleshooting.md"
    if "config.json: " in str(error):  # about the model's family
        model_page = "docs/models.md"
    pages = {ConfigError: config_page, DataError: "docs/data.md", CheckpointError: model_page}
    found = (page for kind, page in pages.items() if isinstance(error, kind))
    return f" (see {next(found, 'docs/troubleshooting.md')})"


def print_to_stderr(line: str) -> None:
    """Print to standard error, which may be gone with the launcher."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def exit_with_one_line(
    rank: int | None = None, goes_on: bool = False, page: str = "docs/configuration.md"
) -> Iterator[None]:
    """Turn an error of the block into one line on standard error and the exit code.

    Args:
        rank: of this process, if it belongs to a run. Rank 0 prints what all ranks know. The process exits here without
            Python's teardown: running threads of the process group would now and then abort a finished run
            ("terminate called without an active exception").
        goes_on: whether the program continues after a block without an error.
        page: of the docs, for a ConfigError.
    """
    code: Any = 0
    guard_logging()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        code, line = describe_and_save(error)
        if rank and code == EXIT_CODE:
            # A launcher kills all ranks when one exits, so rank 0, which prints, must exit first.
            time.sleep(RANK_0_PRINTS if isinstance(error, RunRefused) else RANK_0_SPEAKS)
        if not rank or not isinstance(error, (RunRefused, KeyboardInterrupt)):
            print(f"error: {line}{_help_page(error, page)}", file=sys.stderr, flush=True)
    except SystemExit as leaving:
        code = leaving.code
    if rank is not None and (code or not goes_on):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    if code:
        sys.exit(code)
