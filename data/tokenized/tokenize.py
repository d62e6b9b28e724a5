"""Turn records into token ids and labels.

A record's whole text is tokenized at once, exactly as a server would tokenize it, and a token is trained when it holds
a trained character. (Some prompts end with a blank that the tokenizer joins with the first word of the answer; the
word has to be learnt.) Labels are aligned with the input ids (not shifted).

Cost: `encode_many` gives a whole chunk to the tokenizer's own batch encoding, which is where the time goes, and asks
the encoding only for the tokens at the ends of each range.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from pydantic import BaseModel
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from data.chat.messages import JSON, Said
from data.chat.prompts import AnyPrompts, as_prompts
from data.chat.rendered import RenderedText
from data.chat.sandbox import SlowTemplate
from data.errors import DataError
from data.images.expansion import counted_images
from data.images.image import Image
from data.images.marks import Placed
from data.images.pictures import Pictures
from data.records.files import SURROGATE
from data.records.formats import convert
from data.records.record import Record, Tokenized
from data.sample_set import IGNORED, Sample
from data.tokenized.ready_made import ready_made
from data.tokenized.writer import Writer

JOINED = "one token holds the end of a prompt and the beginning of its answer, so that a server sends others"

AnyRecord = Record | dict[str, Any]  # parsed, or its JSON object


class Tokens(NamedTuple):
    """Hold one tokenized record in its compact form."""

    ids: list[int]
    loss: list[tuple[int, int]]  # ranges [begin, end) of trained tokens, in order, none empty
    notes: dict[str, str] = {}  # see `RenderedText`; nobody changes it
    images: tuple[Placed, ...] = ()  # in order, each with the tokens that stand for it

    def sample(self) -> Sample:
        """Make a sample with a label for each token."""
        labels = [IGNORED] * len(self.ids)
        for begin, end in self.loss:
            labels[begin:end] = self.ids[begin:end]
        sample: Sample = {"input_ids": self.ids, "labels": labels}
        return sample | {"images": [placed.image for placed in self.images]} if self.images else sample


def encode(
    record: AnyRecord, tokenizer: PreTrainedTokenizerBase, max_seq_len: int, prompt_format: AnyPrompts = None
) -> Sample:
    """Turn one record of any kind into token ids and labels.

    Args:
        max_seq_len: what is longer is cut at the end.
        prompt_format: how it is written.

    Raises:
        DataError: the record is wrong or the format cannot hold it.
    """
    sample = encode_tokens(record, tokenizer, prompt_format).sample()
    return {"input_ids": sample["input_ids"][:max_seq_len], "labels": sample["labels"][:max_seq_len]}


def encode_tokens(
    record: AnyRecord,
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: AnyPrompts = None,
    pictures: Pictures | None = None,
) -> Tokens:
    """Encode a record without a limit on its length, in the compact form."""
    (tokens,) = encode_many([record], tokenizer, prompt_format, pictures)
    if isinstance(tokens, DataError):
        raise tokens
    return tokens


def encode_many(
    records: Sequence[AnyRecord],
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: AnyPrompts = None,
    pictures: Pictures | None = None,
) -> list[Tokens | DataError]:
    """Encode many records at once, in order; a bad record's error takes its place.

    Args:
        pictures: the model's own of images, where a record has some.

    Raises:
        DataError: the format cannot be used with this tokenizer, whatever the record.
    """
    writer = Writer(tokenizer, as_prompts(prompt_format), pictures)
    made: list[tuple[RenderedText, list[int]] | Tokens | DataError] = []
    for given in records:
        try:
            record = given if isinstance(given, BaseModel) else _record(given)
            made.append(_ready(record, tokenizer) if isinstance(record, Tokenized) else writer.write(record))
        except DataError as error:
            made.append(error)
        except SlowTemplate as error:
            raise DataError(str(error)) from None

    written = [each[0] for each in made if not isinstance(each, (Tokens, DataError))]
    # transformers itself goes this way, and then makes objects of each sample that nobody needs here.
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    texts = list(chain.from_iterable(each.pieces or (each.text,) for each in written))
    encodings = iter(backend.encode_batch(texts, add_special_tokens=False))
    done = [each if isinstance(each, (Tokens, DataError)) else _tokens(*each, encodings) for each in made]
    if pictures is None:
        return done
    token = pictures.image_token
    return [_with_images(each, token) if isinstance(each, Tokens) and each.images else each for each in done]


def encode_question(
    said: Sequence[Said],
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: AnyPrompts = None,
    tools: list[JSON] | None = None,
    images: Sequence[Image] = (),
    pictures: Pictures | None = None,
) -> list[int]:
    """Encode the prompt: the dialogue up to where the answer to its last message begins.

    Args:
        tools: what the answer may call.
        images: that marks in the dialogue are numbers of, which `pictures` looked at.

    Raises:
        DataError: the format cannot hold the dialogue, or some of it is no text.
    """
    try:
        asked, prefix = Writer(tokenizer, as_prompts(prompt_format), pictures).ask(said, tools or [], images)
    except SlowTemplate as error:
        raise DataError(str(error)) from None
    return prefix + list(chain.from_iterable(_ids(piece, tokenizer) for piece in asked.pieces or (asked.text,)))


def encode_beginning(text: str, tokenizer: PreTrainedTokenizerBase, prompt_format: AnyPrompts = None) -> list[int]:
    """Encode a text to continue, like the beginning of a pretrain record.

    Raises:
        DataError: there are none, or it is no text.
    """
    if not (ids := Writer(tokenizer, as_prompts(prompt_format)).beginning + _ids(text, tokenizer)):
        raise DataError("expected a text to go on with, found none")
    return ids


def _ready(record: Tokenized, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    images = (Placed(image, image.begin, image.begin + image.tokens) for image in record.images)
    return Tokens(*ready_made(record, tokenizer), images=tuple(images))


def _with_images(tokens: Tokens, token: int) -> Tokens | DataError:
    try:
        return tokens._replace(images=counted_images(tokens.images, tokens.ids, token))
    except DataError as error:
        return error


def _record(given: Any) -> Record:
    if len(records := convert(given).records) > 1:
        raise DataError(f"expected an object that makes one record, found one that makes {len(records)}")
    return records[0]


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if (broken := SURROGATE.search(text)) is not None:  # as Python keeps a byte that it could not read
        raise DataError(f"{broken.group()!a}: no character; expected text, in UTF-8 where it comes from outside")
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _tokens(written: RenderedText, prefix: list[int], encodings: Iterator[Encoding]) -> Tokens:
    if written.pieces:
        return _joined_tokens(written, encodings)
    encoding = next(encodings)
    chars: Any = encoding.token_to_chars  # of a token: begin and end
    tokens = range(len(encoding))

    loss = []
    notes = written.notes
    shift = len(prefix)
    for begin, end in written.loss:
        first = bisect_left(tokens, (begin,), key=chars)  # that begins there, or behind what the normalizer dropped
        last = bisect_left(tokens, (end,), first, key=chars)

        # A token at a border may hold characters of both sides: it belongs to the one that has more than white space.
        while first and chars(first - 1)[1] > begin:  # the token before holds this character, too
            if encoding.tokens[first - 1].strip() == written.text[chars(first - 1)[0] : begin].strip():
                break  # it is the prompt's and took the white space behind it
            first -= 1
            notes = {JOINED: repr(written.text[slice(*chars(first))])} | notes
        if last - 1 > first and chars(last - 1)[1] > end and not written.text[chars(last - 1)[0] : end].strip():
            last -= 1  # it is what follows, and took the white space before it
        if first < last:
            loss.append((first + shift, last + shift))

    images = []
    for image, begin, end in written.images:
        first = bisect_left(tokens, (begin,), key=chars)
        images.append(Placed(image, first + shift, bisect_left(tokens, (end,), first, key=chars) + shift))
    return Tokens(prefix + encoding.ids if prefix else encoding.ids, loss, notes, tuple(images))


def _joined_tokens(written: RenderedText, encodings: Iterator[Encoding]) -> Tokens:
    """Join the tokens of a text's pieces, each of which is trained as a whole or not at all."""
    ids: list[int] = []
    loss = []
    place = 0
    for piece in written.pieces:
        first = len(ids)
        ids += next(encodings).ids
        if ids[first:] and any(begin <= place < end for begin, end in written.loss):
            loss.append((first, len(ids)))
        place += len(piece)
    return Tokens(ids, loss, written.notes)
