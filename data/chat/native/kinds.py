"""Build tokenizers of folders with remote code, and export them.

Each kind ships a vocabulary and a tokenizer class of its own that must never run (and mostly no longer can). It is
rebuilt as a `tokenizers` BPE with the ids of the original, which tells where its tokens lie in the text.

Cost: a second for each 100 thousand tokens, once a process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.terminal import reason_of
from data.chat.native import families
from data.chat.native.pieces import read_json
from data.errors import DataError

Settings = dict[str, Any]


class Kind(NamedTuple):
    """Describe the tokenizers of one `model_type`."""

    vocabulary: str  # the file that they are made of
    # Makes one of that file and tokenizer_config.json, with its special tokens and its template as published.
    build: Callable[[Path, Settings], tuple[Tokenizer, Settings]]
    fixed: bool = False  # these count, whatever the folder says
    shipped: bool = False  # servers read the vocabulary too: an export keeps it, a folder without it may hold another


FLAGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")
MODEL = "tokenizer.model"
LLAMA = "llama mistral mixtral internlm LlamaTokenizer LLaMATokenizer InternLMTokenizer".split()
# By model_type, and by what tokenizer_config.json calls the class.
KINDS = {
    **dict.fromkeys(("chatglm", "ChatGLMTokenizer"), Kind(MODEL, families.chatglm3, fixed=True)),
    **dict.fromkeys(("baichuan", "BaiChuanTokenizer", "BaichuanTokenizer"), Kind(MODEL, families.baichuan)),
    **dict.fromkeys(("internlm2", "InternLM2Tokenizer"), Kind(MODEL, families.internlm2)),
    **dict.fromkeys(LLAMA, Kind(MODEL, families.llama, shipped=True)),
    **dict.fromkeys(("qwen", "QWenTokenizer"), Kind("qwen.tiktoken", families.qwen)),
}


def native_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """Build the tokenizer of a folder of these kinds; None for others and with a tokenizer.json.

    Raises:
        DataError: the folder's vocabulary is missing or damaged, or does not fit what tokenizer_config.json says.
    """
    settings = read_json(folder / "tokenizer_config.json")
    kind = _kind(folder, settings)
    if kind is None or (folder / "tokenizer.json").is_file():
        return None

    path = folder / kind.vocabulary
    if not path.is_file():
        if kind.shipped:
            return None
        raise DataError(f"{path}: not found; expected the vocabulary that the checkpoint ships")
    try:
        backend, options = kind.build(path, settings)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            model_input_names=["input_ids", "attention_mask"],
            clean_up_tokenization_spaces=False,
            **options if kind.fixed else options | _stated(folder, settings, options),
        )
        stated = read_json(folder / "generation_config.json").get("eos_token_id")
        if stated is not None and end_tokens(tokenizer).isdisjoint(_ids(stated)):
            # Lines may be lost at the end of a vocabulary, so that what follows it has other ids.
            raise DataError(
                f"{path}: has other ids than generation_config.json (eos_token_id {stated}); fetch it again"
            )
        return tokenizer
    except DataError:
        raise
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:  # settings may hold anything
        raise DataError(f"{folder}: no usable tokenizer: {reason_of(error)}") from None


def export_tokenizer(source: Path, target: Path, native: bool = True) -> None:
    """Write the tokenizer of a folder of these kinds as a tokenizer.json, which needs no code to load.

    generation_config.json gets the tokens that end an answer beside its own. A folder without a tokenizer is left
    without one.

    Args:
        native: else only where transformers 5 would make other ids of what was published: of LLaMA's kind.

    Raises:
        DataError: as `native_tokenizer`.
    """
    kind = _kind(source, read_json(source / "tokenizer_config.json"))
    if kind is None or not (native or kind.shipped) or not (source / kind.vocabulary).is_file():
        return
    if (tokenizer := native_tokenizer(source)) is None:
        return
    tokenizer.save_pretrained(target)
    if kind.shipped:
        return
    (target / kind.vocabulary).unlink(missing_ok=True)  # the copy of what nothing reads there
    path = target / "generation_config.json"
    settings = read_json(path)
    settings["eos_token_id"] = sorted(end_tokens(tokenizer) | _ids(settings.get("eos_token_id")))
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def older_template(folder: Path) -> str | None:
    """Read the template of chat_template.json, as models with images have it; transformers' tokenizers ignore it.

    Raises:
        DataError: the file has none.
    """
    path = folder / "chat_template.json"
    template = read_json(path).get("chat_template")
    if path.is_file() and not isinstance(template, str):
        raise DataError(f'{path}: expected {{"chat_template": "..."}}')
    return template


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """List the ids that end an answer: the end of sequence, ChatML's, and the roles that a ChatGLM3 hands over to."""
    names = ("eos_token_id", "im_end_token_id", "user_token_id", "observation_token_id")
    return {number for name in names if (number := getattr(tokenizer, name, None)) is not None}


def _kind(folder: Path, settings: Settings) -> Kind | None:
    stated = settings.get("tokenizer_class") or read_json(folder / "config.json").get("model_type")
    return KINDS.get(str(stated).removesuffix("Fast"))


def _ids(stated: Any) -> set[int]:
    """Return the ids of an eos_token_id, which may be one, several or none."""
    return {each for each in (stated if isinstance(stated, list) else [stated]) if isinstance(each, int)}


def _stated(folder: Path, settings: Settings, options: Settings) -> Settings:
    """Return the special tokens and the template that the folder states."""
    template = folder / "chat_template.jinja"
    found = read_json(folder / "special_tokens_map.json") | settings
    found |= {"chat_template": found.get("chat_template") or older_template(folder)}
    found |= {"chat_template": template.read_text(encoding="utf-8")} if template.is_file() else {}
    # Some folders state empty names, which stand for the usual ones.
    names = [name for name in options if name.endswith(("_token", "template")) and found.get(name) not in (None, "")]
    if wrong := [name for name in FLAGS if not isinstance(found.get(name, False), (bool, type(None)))]:
        raise DataError(f"{folder / 'tokenizer_config.json'}: {wrong[0]}: expected true or false")
    stated = {name: found[name]["content"] if isinstance(found[name], dict) else found[name] for name in names}
    return stated | {name: found[name] for name in ("model_max_length",) if name in found}
