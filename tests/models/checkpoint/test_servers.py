"""Shows that `check` names, for each server, what a folder lacks, and nothing of one that has it all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file, save_file

import convert_model
from models.conversion.check import SERVERS, check
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from models.errors import CheckpointError
from tests.conftest import ORIGINALS
from tests.models.cases import CASES
from tests.models.helpers import copy_of, read_config

Make = Callable[..., Path]
OLD = [server for server, is_old in SERVERS.items() if is_old]
NEW = [server for server, is_old in SERVERS.items() if not is_old]


@pytest.fixture
def folder(make_checkpoint: Make, tmp_path: Path) -> Path:
    return copy_of(make_checkpoint("llama", {"max_shard_size": "100KB"}), tmp_path / "folder")


def assert_all_lack(folder: Path, what: str) -> None:
    for server, missing in check(folder).items():
        assert any(what in each for each in missing), (server, missing)


REFUSED = {
    "bloom": {"SGLang from 0.5.10": "no class"},
    "bloom-untied": {"SGLang from 0.5.10": "no class", "vLLM from 0.19.1": "tied head"},
    "qwen2-some-windows": {"vLLM from 0.19.1": "in all blocks or in none"},
}


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("baichuan-13b", "baichuan2-13b", *REFUSED)])
def test_an_export_for_older_releases_is_complete(name: str, make_checkpoint: Make, tmp_path: Path) -> None:
    hg_to_pp(make_checkpoint(CASES[name].model_type, **CASES[name].changes), tmp_path / "layers")
    code = read_config(tmp_path / "layers")["model_type"] in ORIGINALS
    options = ExportOptions(layout="native" if code else "original", compat=True)
    pp_to_hg(tmp_path / "layers", tmp_path / "out", options=options)
    assert check(tmp_path / "out") == {server: [] for server in SERVERS}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_server_does_not_take_is_named(name: str, make_checkpoint: Make) -> None:
    found = check(make_checkpoint(CASES[name].model_type, **CASES[name].changes))
    for server in NEW:
        assert len(found[server]) == (server in REFUSED[name])
        assert REFUSED[name].get(server, "") in " ".join(found[server])


def test_what_transformers_5_saves_is_told_to_the_door(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(sys, "argv", ["convert_model.py", "check", "--input-path", str(folder)]):
        convert_model.main()
        (folder / "tokenizer.json").rename(folder / "other.json")
        with pytest.raises(SystemExit, match=r"\A1\Z"):
            convert_model.main()
    lines = capsys.readouterr().out.splitlines()
    told = dict(line.split(": ", 1) for line in lines[: len(SERVERS)])
    assert [told[server] for server in NEW] == ["complete"] * len(NEW)
    for server in OLD:
        assert "without torch_dtype, rope_theta, tokenizer_class, chat_template that it knows" in told[server]
        assert "--compat" in told[server]


@pytest.mark.parametrize(("file", "told"), [("tokenizer.json", "no tokenizer.json"), ("chat_template.jinja", "chat t")])
def test_a_missing_file_is_named(file: str, told: str, folder: Path) -> None:
    (folder / file).unlink()
    assert_all_lack(folder, told)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert_all_lack(folder, shard.name)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_names_that_no_server_looks_for_are_told(
    prefix: str, make_checkpoint: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy_of(make_checkpoint("llama"), tmp_path / "folder")
    path = folder / "model.safetensors"
    save_file({prefix + name: tensor for name, tensor in load_file(path).items()}, path)
    told = f"the names of its weights begin with {prefix}model., which no server looks for"
    assert_all_lack(folder, told)
    hg_to_pp(folder, tmp_path / "layers")
    pp_to_hg(tmp_path / "layers", tmp_path / "out")
    assert told in caplog.text


def test_shards_without_an_index_are_told(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    assert_all_lack(folder, "no index of its weight files")


@pytest.mark.parametrize(("name", "told"), [("chatglm3", "--layout native"), ("baichuan2-13b", "has no class")])
def test_code_of_a_publisher_is_told(name: str, told: str, make_checkpoint: Make) -> None:
    assert_all_lack(make_checkpoint(CASES[name].model_type, **CASES[name].changes), told)


def test_pipeline_layers_are_refused(both_layouts: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="export it with pp_to_hg"):
        check(both_layouts["pipeline"])
