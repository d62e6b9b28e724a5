"""The one exception that a damaged or unsuitable checkpoint raises.

Its text is a single line for the person who gave the folder: which file, which tensor, what was expected. The doors
print it and leave with exit code 2; a traceback would only hide it.
"""


class CheckpointError(ValueError):
    """A model folder cannot be used as it is."""
