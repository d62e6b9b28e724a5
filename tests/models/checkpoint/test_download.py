"""Models from a hub, a small one on this machine: weights and side files, no code; by name, or by `download`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from models import load_model
from models.checkpoint import hub
from models.checkpoint.hub import download, find_model
from models.conversion.to_pipeline import hg_to_pp
from models.errors import CheckpointError
from tests.hub import COMMIT, NAME, TAGGED, serving
from tests.launching import Launch
from tests.models.helpers import contents, copy_of, error_line, write_weights


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """What HF_ENDPOINT does, which the library reads only once; other processes read it anew."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_ENDPOINT", address)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of the hub, which this process has not asked yet."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    hub._snapshot.cache_clear()


@pytest.fixture
def sent() -> list[str]:
    """The files that the hub has sent."""
    return []


@pytest.fixture
def repository(
    llama: Callable[..., Path], sent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """What a repository holds: a model, code, and weights in other formats."""
    folder = copy_of(llama(), tmp_path / "repository")
    (folder / "modeling_llama.py").write_text("raise SystemExit")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    with serving(folder, sent) as address:
        use_hub(monkeypatch, address)
        yield folder


def fetched(folder: Path) -> dict[str, bytes]:
    """What a download left, but for the hub client's own notes."""
    return {name: data for name, data in contents(folder).items() if not name.startswith(".cache")}


def test_download_takes_weights_and_side_files_and_no_code(
    repository: Path, llama: Callable[..., Path], tmp_path: Path
) -> None:
    (repository / "pytorch_model-00001-of-00002.bin").write_bytes(b"the same weights, once more")
    (repository / "additional_chat_templates").mkdir()
    for name in ("tool_use.jinja", "of_tools.py"):
        (repository / "additional_chat_templates" / name).write_text("{{ tools }}")
    download(NAME, tmp_path / "model")
    assert fetched(tmp_path / "model") == contents(llama()) | {
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}"
    }


def test_download_takes_bin_files_where_there_is_nothing_else(repository: Path, tmp_path: Path) -> None:
    write_weights(repository, {"pytorch_model.bin": {}})
    (repository / "training_args.bin").write_bytes(b"a pickle")
    download(NAME, tmp_path / "model")
    assert "pytorch_model.bin" in fetched(tmp_path / "model")
    assert "training_args.bin" not in fetched(tmp_path / "model")


def test_an_unknown_model_and_an_unreachable_hub_are_errors_of_one_line(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "someone/else" in error_line(lambda: download("someone/else", tmp_path / "model"))
    use_hub(monkeypatch, "a-mirror-without-https")
    assert NAME in error_line(lambda: download(NAME, tmp_path / "model"))


def test_a_hub_that_is_not_reached_is_answered_with_a_mirror(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = error_line(lambda: download("someone/else", tmp_path / "model"))
    use_hub(monkeypatch, "http://127.0.0.1:9")
    mirror = "HF_ENDPOINT=https://hf-mirror.com in front of the command"
    ways = f"; other ways: {mirror}, or modelscope download --model {NAME}"
    assert ways in error_line(lambda: download(f"{NAME}@v1", tmp_path / "model"))
    assert ways in error_line(lambda: find_model(f"{NAME}@v1"))
    assert "other ways" not in answered


def command(name: str) -> str:
    return f"python convert_model.py download --model-name {name} --save-path DIR"


@pytest.mark.parametrize("name", [NAME, f"{NAME}@v1"])
def test_a_name_stands_for_the_snapshot_in_the_cache(
    name: str, repository: Path, llama: Callable[..., Path], tmp_path: Path
) -> None:
    found = find_model(name)
    assert contents(found) == contents(llama())
    assert found.name == (TAGGED if "@" in name else COMMIT)
    for mine, theirs in zip(load_model(name).parameters(), load_model(llama()).parameters(), strict=True):
        assert torch.equal(mine, theirs)
    hg_to_pp(name, tmp_path / "layers")
    hg_to_pp(llama(), tmp_path / "other")
    assert contents(tmp_path / "layers") == contents(tmp_path / "other")


def test_a_plan_fetches_no_weights(repository: Path) -> None:
    assert not list(find_model(NAME, weights=False).glob("*.safetensors"))
    assert list(find_model(NAME).glob("*.safetensors"))


def test_a_local_folder_wins(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir(parents=True)
    assert find_model(NAME) == Path(NAME)
    with pytest.raises(CheckpointError, match=r"someone/other: not found; expected a model folder$"):
        find_model("someone/other")


def test_pickled_weights_are_not_fetched_by_name(repository: Path) -> None:
    write_weights(repository, {"pytorch_model.bin": {}})
    line = error_line(lambda: find_model(NAME))
    assert command(NAME) in line and "no safetensors" in line


@pytest.mark.parametrize("name", [NAME, f"{NAME}@v1"])
def test_without_a_network_the_cache_is_used_or_the_command_named(
    name: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_model(name)
    for offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        use_hub(monkeypatch, "http://127.0.0.1:9")
        hub._snapshot.cache_clear()
        assert find_model(name) == found
        for other in ("someone/else@v2", f"{NAME}@v2"):
            assert command(other) in error_line(partial(find_model, other))


def test_several_processes_fetch_a_model_once(repository: Path, sent: list[str]) -> None:
    words = (sys.executable, "-c", f"from models.checkpoint.hub import find_model; find_model({NAME!r})")
    launches = [Launch(*words, environment={"LOCAL_RANK": str(rank)}) for rank in range(3)]
    ended = [launch.end() for launch in launches]
    assert [done.returncode for done in ended] == [0, 0, 0], ended[0].stderr
    assert ["fetching" in done.stderr for done in ended] == [True, False, False]
    weights = [name for name in sent if name.endswith(".safetensors")]
    assert len(weights) == len(set(weights)) > 0
