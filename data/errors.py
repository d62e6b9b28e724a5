"""The one exception that a bad data file or record raises.

Its text is a single line for the person whose data it is: which file, which record, which field, what was expected.
"""


class DataError(ValueError):
    """A data file or a record cannot be used as it is."""
