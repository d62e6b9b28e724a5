"""Define the one exception that a bad data file or record raises.

Its text is a single line for the person whose data it is: which file, which record, which field, what was expected.
"""

from common.terminal import safe_line


class DataError(ValueError):
    """Report an unusable data file or record. Each argument is a line; several are for several bad records."""

    def __str__(self) -> str:
        return "\n".join(safe_line(str(line)) for line in self.args)
