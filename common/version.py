"""Pipetune's version. pyproject.toml has it too, but is not part of every copy of the code; a test compares them."""

VERSION = "0.2.0"
