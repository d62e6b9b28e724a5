"""A tokenizer, as the tests of the data have it."""

from tests.data.conftest import tokenizer

__all__ = ["tokenizer"]
