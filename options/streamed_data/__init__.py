"""Tokenize records while a run trains on them, a window at a time (docs/data.md#data-larger-than-the-disk)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from training.config.changes import MayChange
from training.config.keys import TrainConfig
from training.option import Option

if TYPE_CHECKING:
    from training.language_model import LanguageModel


class StreamKeys(TrainConfig):
    """A run whose records may be larger than the disk."""

    stream_gb: float | None = Field(default=None, gt=0)
    """Tokenize while training, with at most this many GB of tokenized records in `cache_dir`
    (docs/data.md#data-larger-than-the-disk); needs `max_steps`. Without the key everything is tokenized before
    training."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.stream_gb:
            return
        if not self.max_steps:
            yield "max_steps: expected a number, as nobody knows how many steps an epoch of a stream has"
        if self.packing == "dataset":
            yield "packing: dataset packs whole epochs, which no stream knows; expected batch or false"
        if self.eval_share:
            yield "eval_share: nobody knows all samples of a stream; expected eval_data_path"

    @property
    def windows_key(self) -> str:
        return super().windows_key if self.stream_gb is None else "stream_gb"


def _language_model(config: StreamKeys) -> type[LanguageModel] | None:
    if config.stream_gb is None:
        return None
    from options.streamed_data.task import StreamedLanguageModel

    return StreamedLanguageModel


OPTION = Option(
    StreamKeys, before="max_seq_len", rules={"stream_gb": MayChange(free=False)}, language_model=_language_model
)
