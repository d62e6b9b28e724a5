"""What a sample is: records, prompts, token ids and labels, global batches."""

from data.errors import DataError
from data.tokenize import encode, load_tokenizer

__all__ = ["DataError", "encode", "load_tokenizer"]
