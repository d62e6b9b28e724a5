"""The blocks of docs/api.md run: those that train by the real launcher, the others here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from models import load_model
from options import load_config
from tests.cases import tiered
from tests.conftest import ROOT, write_records
from tests.docs.pages import blocks, commands
from tests.launching import metrics, run, topology, write_config
from training.batches import build_loader
from training.data_setup import RecordReader

TEXT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def scripts() -> list[str]:
    """The document's scripts: a block that imports nothing goes on with the one before it."""
    found: list[str] = []
    for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
        if re.search(r"^(import|from) ", block, re.MULTILINE):
            found.append(block)
        else:
            found[-1] += block
    return found


def trains(script: str) -> bool:
    return bool(re.search(r"\btrain\(", script))


HERE = [script for script in scripts() if not trains(script)]
LAUNCHED = [script for script in scripts() if trains(script)]


@pytest.fixture(scope="module")
def folder(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the scripts find where they run."""
    folder = tmp_path_factory.mktemp("api")
    shutil.copytree(make_checkpoint("llama"), folder / "model")
    write_records(folder / "records.json", 16)
    keys: dict[str, Any] = {"model_path": "model", "data_path": "records.json", "save_path": "run"}
    write_config(folder / "run.yml", **keys, model_topo=topology((2, 1), [2, 3]))
    (own,) = blocks("yaml", pages=("docs/api.md",))
    (folder / "classifier.yml").write_text(own.text)
    return folder


def test_there_is_a_script_for_each_subject() -> None:
    wanted = (
        "generate( hg_to_pp( encode( Plan.make( train(load_config loss=smoothed callbacks=[ Pipeline( forward_step="
    )
    assert [each for each in wanted.split() if not any(each in script for script in scripts())] == []


@pytest.mark.parametrize("number", range(len(HERE)))
def test_what_one_process_does(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    exec(compile(HERE[number], "docs/api.md", "exec"), {"__name__": "docs"})
    if "learnt" in HERE[number]:
        assert capsys.readouterr().out.startswith("Lima.")


FROM_ELSEWHERE = "import options, pipetune; assert pipetune.load_config is options.load_config"


def test_a_script_runs_from_any_folder(tmp_path: Path) -> None:
    """After the page's line, and not without it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "script.py").write_text(FROM_ELSEWHERE)
    (line,) = commands(blocks("bash", pages=("docs/api.md",))[0].text)
    codes = []
    for typed in (line, "true"):
        script = f"{typed} && cd {tmp_path} && {sys.executable} mine/script.py"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, check=False)
        codes.append(done.returncode)
    assert codes == [0, 1]


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("number", tiered(range(len(LAUNCHED)), quick=(), longest=["[02-5]"]))
def test_what_trains(number: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "script.py"
    path.write_text(f"import os\n\nos.chdir({str(folder)!r})\n{LAUNCHED[number]}")
    before = {each.name for each in folder.iterdir()}
    done = run(sys.executable, path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (made,) = ({each.name for each in folder.iterdir()} - before) - {"script.py"}
    lines = metrics(folder / made)
    assert lines
    assert (folder / made / "latest").exists()
    if "callbacks=" in LAUNCHED[number]:
        largest = max(line["grad_norm"] for line in lines if "grad_norm" in line)
        assert f"largest gradient norm: {largest:.3f}" in done.stdout
    if "loss=smoothed" in LAUNCHED[number]:
        monkeypatch.chdir(folder)
        assert lines[0]["loss"] == pytest.approx(smoothed_loss(), abs=1e-5)


@torch.no_grad()
def smoothed_loss() -> float:
    """Of the first batch of run.yml, sample by sample in one process."""
    config = load_config("run.yml")
    dataset = RecordReader(config, Path("model"), Console(quiet=True)).read("data", config.data_path)
    batch, model, total = build_loader(dataset, config).batch(0), load_model("model", torch.float32), 0.0
    for sample in (dataset.samples[number] for number in batch.samples):
        ids, labels = (torch.from_numpy(numpy.array(sample[part], numpy.int64)) for part in ("input_ids", "labels"))
        logits, labels = model(ids.unsqueeze(0))[0, :-1], labels[1:]
        known = labels != -100
        total += F.cross_entropy(logits[known], labels[known], label_smoothing=0.1, reduction="sum").item()
    return total / batch.supervised
