"""Load a run's samples: from the cache, or tokenized now."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy
from rich.console import Console

from data.chat.prompts import PromptFormat, Prompts, as_prompts
from data.paths import cache_folder
from data.records.sources import as_sources, files_of, mixture
from data.settings import AS_THE_MODEL, OnBadRecord, Pixels, Source, Truncate, Wanted
from data.tokenized.dataset import Dataset
from data.tokenized.recipe import DataFile, Recipe
from data.tokenized.store import open_cache


def load_dataset(
    data_path: str | Path | Source | Sequence[str | Path | Source],
    tokenizer: str | Path,
    max_seq_len: int,
    prompt_format: Prompts | PromptFormat,
    *,
    on_bad_record: OnBadRecord = "stop",
    truncate: Truncate = "turns",
    preference: Wanted | None = None,
    pixels: Pixels = AS_THE_MODEL,
    seed: int = 0,
    cache_dir: str | Path | None = None,
    log: Console | None = None,
) -> Dataset:
    """Load a run's samples, from the cache or tokenized now.

    Args:
        data_path: files, globs and folders, or a mixture of sources.
        tokenizer: folder of the tokenizer.
        preference: which kind of preference records they are; none where absent.
        pixels: between how many images are resized to.
        seed: by which a mixture draws.
        cache_dir: where tokenized data lie; see `data.paths.default_folder`.
        log: gets a line that says whom this process waits for.

    Raises:
        DataError: a file or a record is wrong, or no trained token is left.
    """
    sources, log = as_sources(data_path), log or Console(quiet=True)
    files = []
    for source in sources:
        paths = files_of(source, log.print)
        files.append([DataFile(str(path), source.format, source.columns) for path in paths])
    every = tuple(chain.from_iterable(files))
    recipe = Recipe(
        every,
        str(tokenizer),
        as_prompts(prompt_format),
        max_seq_len,
        on_bad_record,
        truncate,
        preference,
        pixels=pixels,
    )
    folder = cache_folder(cache_dir)
    found = open_cache(recipe, folder, log)
    dataset = Dataset(found, [file.path for file in recipe.files])
    if all(source.weight is None and source.repeat == 1 for source in sources):
        return dataset
    in_file = numpy.bincount(dataset.samples.column("file"), minlength=len(recipe.files))
    ends = numpy.cumsum([len(its) for its in files])
    return dataset.select(mixture(sources, [int(each.sum()) for each in numpy.split(in_file, ends[:-1])], seed))
