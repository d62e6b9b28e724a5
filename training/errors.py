"""What ends a run because of something the user can mend.

The doors print the text, one line, and leave with exit code 2.
"""

from data.errors import DataError
from models.errors import CheckpointError


class ConfigError(ValueError):
    """A YAML file, a command line or the set of started processes does not make a run."""


class RunRefused(Exception):
    """Some rank cannot go on; every rank raises it with the same text, so that all leave together."""


USER_ERRORS = (ConfigError, DataError, CheckpointError)
EXIT_CODE = 2
