"""What the documentation shows of configs, records and Python is what the program takes.

docs/api.md has a test of its own, which runs its scripts.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from data.records.formats import convert
from data.settings import FORMAT_NAMES, Wanted
from options import RunConfig, load_config
from options.reference import BEGIN, CHINESE, END, FROM, FROM_CHINESE, PAGE, translated, written
from tests.conftest import ROOT
from tests.data.images.dialogues import look
from tests.docs.pages import PAGES, Block, blocks, text_of

REQUIRED = {"model_path": "model", "data_path": "records.json", "save_path": "run", "train_batch_size": 64}
LANGUAGES = {"", "text", "bash", "json", "yaml", "python", "mermaid"}
# These show parts of files, which use names of the rest.
FRAGMENTS = ("docs/adding-a-model.md", "docs/adding-a-model_CN.md")
OTHERS = {"onnxruntime"}  # packages that not every environment has


def records_of(text: str) -> list[dict[str, Any]]:
    """The objects of a block: a list, or one after the other."""
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    decoder, found, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        found.append(value)
        rest = rest[end:].lstrip()
    return found


def test_every_block_has_a_known_language() -> None:
    assert [each.place for each in blocks() if each.language not in LANGUAGES] == []


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.place)
def test_a_config_is_taken(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = yaml.safe_load(block.text)
    path = tmp_path / "config.yml"
    if theirs := keys.get("deepspeed_config"):
        monkeypatch.chdir(tmp_path)
        Path(theirs).write_text("{}")
    path.write_text(block.text)
    load_config(path, [f"{key}={REQUIRED[key]}" for key in REQUIRED.keys() - keys.keys()])


@pytest.mark.parametrize(
    "block", [each for each in blocks("json") if not each.page.startswith("docs/demo")], ids=lambda block: block.place
)
def test_a_record_is_taken(block: Block) -> None:
    wanted = Wanted("pairs") if '"rejected' in block.text else Wanted("marked") if '"kto_tag' in block.text else None
    for record in records_of(block.text):
        converted = convert(record, preference=wanted, look=look)
        assert (converted.records or converted.judged) and not converted.unused


def test_every_format_of_records_is_told() -> None:
    page = text_of("docs/data.md")
    assert [name for name in FORMAT_NAMES if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.place)
def test_python_is_valid_and_imports_what_is_there(block: Block) -> None:
    fragment = block.page in FRAGMENTS
    try:
        tree = ast.parse(block.text)
    except SyntaxError:  # one line of a dictionary
        tree = ast.parse("{" + block.text + "}")
        assert fragment, block.place
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] not in OTHERS:
            module = importlib.import_module(node.module)
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []


@pytest.mark.parametrize("page", [PAGE, CHINESE], ids=lambda page: page.name)
def test_the_page_of_keys_is_that_of_the_config(page: Path) -> None:
    there = text_of(f"docs/{page.name}").partition(BEGIN)[2].partition(END)[0]
    assert there == written(page), "expected: python -m options.reference --write"
    for name in RunConfig.model_fields:
        assert f"| `{name}` |" in there or f"| `{name}." in there, name


@pytest.mark.parametrize("page", [FROM, FROM_CHINESE], ids=lambda page: page.name)
def test_the_page_of_other_tools_has_the_names_that_errors_know(page: Path) -> None:
    there = text_of(f"docs/{page.name}").partition(BEGIN)[2].partition(END)[0]
    assert there == written(page), "expected: python -m options.reference --write"
    assert (
        "| `max_seq_len` | `block_size`, `model_max_length` | `max_length`, `max_seq_length` | `sequence_len` |"
        in there
    )


@pytest.mark.parametrize("template", sorted((ROOT / "configs").glob("ds_config_*.yml")), ids=lambda path: path.name)
def test_a_template_names_all_optimizers_and_what_one_needs(template: Path) -> None:
    (comment,) = re.findall(r"^  type: AdamW +# (.*)$", template.read_text(encoding="utf-8"), re.MULTILINE)
    field = RunConfig.model_fields["optimizer"].annotation
    assert re.findall(r"[A-Z]\w+", comment) == list(get_args(get_type_hints(field)["type"]))
    assert re.search(r"Adafactor *[(（].*stage 0.*fp32", comment)


def test_every_translated_key_is_there() -> None:
    texts = yaml.safe_load(CHINESE.with_suffix(".yml").read_text(encoding="utf-8"))
    assert [name for name in texts["keys"] if f"| `{name}` |" not in written()] == []


@pytest.mark.parametrize("keys", [{}, {"seed": {"english": "00000000", "text": "随机种子"}}], ids=["missing", "stale"])
def test_a_key_without_a_translation_is_named(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^seed: expected a translation"):
        translated({"words": {}, "keys": keys}, "seed", "Of the data order.")


def test_every_page_is_looked_at() -> None:
    assert {each.page for each in blocks("bash")} > {"README.md", "README_CN.md", "docs/serving.md"}
    assert len(PAGES) > 20
