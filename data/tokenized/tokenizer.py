"""Load the tokenizer of a model folder, and refuse one that does not make the ids that the model was trained on."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.terminal import reason_of
from data.chat.native.kinds import native_tokenizer, older_template
from data.chat.native.pieces import expected_ids, read_json
from data.errors import DataError

VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "merges.txt", "*.tiktoken", "tekken.json")
READ = {".json", ".jinja", ".model", ".tiktoken", ".txt"}  # suffixes of files that make a tokenizer


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a model folder: transformers' own, or Pipetune's where that is remote code.

    No code from the folder is run.

    Raises:
        DataError: the folder has no tokenizer that transformers can read.
    """
    # transformers warns of texts longer than the model's window; Pipetune cuts and reports them itself.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    for path in sorted(Path(folder).glob("*")):  # transformers would wait at a pipe, and pass over a broken link
        if path.suffix in READ and not path.is_file():
            raise DataError(f"{path}: a broken link or no regular file; fetch it again")

    # A sentencepiece model alone is read by transformers, and compared with what sentencepiece makes of some texts.
    made_of = Path(folder) / "tokenizer.model"
    alone = made_of.is_file() and not made_of.with_suffix(".json").is_file()
    texts = expected_ids(made_of) if alone else ()
    native = native_tokenizer(Path(folder))
    tokenizer = native if native is not None else _published(folder)
    tokenizer.chat_template = tokenizer.chat_template or older_template(Path(folder))
    for name, kind, types in (("model_max_length", "number", (int, float)), ("chat_template", "text", (str, dict))):
        if (stated := getattr(tokenizer, name)) is not None and not isinstance(stated, types):
            raise DataError(f"{folder}/tokenizer_config.json: {name}: expected a {kind}, found {stated!r}")

    if alone and native is None:
        stated = read_json(Path(folder) / "tokenizer_config.json").get("add_bos_token")
        if stated is not (begins := tokenizer.encode("")[:1] == [tokenizer.bos_token_id]):
            raise DataError(
                f"{folder}/tokenizer_config.json: add_bos_token: {stated}, but transformers makes it {begins} here; "
                "expected the same, or a folder with the model's own tokenizer.json"
            )

    added = tokenizer.get_added_vocab()  # which sentencepiece does not know
    for text, expected in texts:
        found = tokenizer.encode(text, add_special_tokens=False)
        if found != expected and not any(name in text for name in added):
            raise DataError(
                f"{made_of}: {text!r} becomes the tokens {found} here, and {expected} by sentencepiece; "
                "expected a folder with the model's own tokenizer.json"
            )
    return tokenizer


def _published(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the folder's tokenizer with transformers."""
    if not any(any(Path(folder).glob(pattern)) for pattern in VOCABULARIES):
        # transformers makes an empty one for some families
        raise DataError(f"{folder}: no usable tokenizer: expected one of the files {', '.join(VOCABULARIES)}")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds here
        raise DataError(f"{folder}: no usable tokenizer: {reason_of(error)}") from None
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):  # of a file that is empty, or of another family
        raise DataError(f"{folder}: no usable tokenizer: it has no words; expected whole files of a tokenizer")
    if not tokenizer.is_fast:
        raise DataError(
            f"{folder}: the tokenizer cannot tell where its tokens lie in the text; expected a tokenizer.json"
        )
    return tokenizer
