"""Whole runs of train_ds.py through every launcher: the loss does not depend on the topology, the results are whole.

The records differ much in length, an epoch's last batch is smaller, and there are two epochs. Each run is made once and
shared by the tests.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from models import load_model
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from options import RunConfig
from tests.conftest import FAQ
from tests.launching import deepspeed, metrics, run, supervised, topology, torchrun, write_config
from tests.models.helpers import assert_same_bits, joined, read_weights, side_files
from tests.ranks import Ranks
from training.option import add_to_export

pytestmark = pytest.mark.launched

PARTS = {(1, 1): [5], (2, 1): [2, 3], (1, 2): [5], (2, 2): [3, 2], (4, 1): [2, 1, 1, 1]}
TIERS = {(1, 2): pytest.mark.slow, (2, 2): pytest.mark.longest, (4, 1): pytest.mark.longest}
EVERYWHERE = [pytest.param(dims, marks=TIERS.get(dims, ())) for dims in PARTS]
Runs = Callable[[tuple[int, int]], Path]
STEPS = 6  # two epochs of 20 records in batches of 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def records(folder: Path) -> Path:
    """Twenty records of the FAQ, of all types."""
    everything = json.loads(FAQ.read_text(encoding="utf-8"))
    path = folder / "records.json"
    path.write_text(json.dumps(everything[::5][:20]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tied(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def runs(folder: Path, records: Path, tied: Path) -> Runs:
    """The same training on any topology, each through another way of starting it where there is one."""

    @cache
    def train(dims: tuple[int, int]) -> Path:
        path = write_config(
            folder / f"run{dims[0]}x{dims[1]}.yml",
            model_path=str(tied),
            data_path=str(records),
            n_epoches=2,
            gradient_clipping=0.5,
            export_hf=True,
            model_topo=topology(dims, PARTS[dims]),
        )
        command = ("train_ds.py", "--config", path)
        processes = dims[0] * dims[1]
        if dims == (1, 1):
            result = run(sys.executable, *command)
        elif dims == (1, 2):
            result = torchrun(processes, *command)
        else:
            result = deepspeed(processes, *command)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return path.with_suffix("")

    return train


@pytest.mark.parametrize("dims", EVERYWHERE[1:], ids=str)
def test_training_agrees_with_one_process(dims: tuple[int, int], runs: Runs) -> None:
    """In losses, gradient norms and the weights at the end."""
    one, found = metrics(runs((1, 1))), metrics(runs(dims))
    assert len(found) == STEPS
    assert min(line["grad_norm"] for line in one) > 0.5, "nothing was clipped"
    for key, atol, rtol in (("loss", 1e-5, 0.0), ("grad_norm", 0.0, 1e-4)):
        values = [torch.tensor([line[key] for line in lines]) for lines in (found, one)]
        torch.testing.assert_close(*values, atol=atol, rtol=rtol)
    weights, expected = (joined(read_weights(runs(each) / "hf")) for each in (dims, (1, 1)))
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=0)


def test_metrics_describe_the_steps(runs: Runs) -> None:
    lines = metrics(runs((2, 1)))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["epoch"] for line in lines] == [1, 1, 1, 2, 2, 2]
    assert [line["samples"] for line in lines] == [8, 8, 4] * 2
    assert sum(line["tokens"] for line in lines[:3]) == sum(line["tokens"] for line in lines[3:])
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("dims", EVERYWHERE, ids=str)
def test_a_run_is_a_valid_input_of_pp_to_hg(dims: tuple[int, int], runs: Runs, tied: Path, tmp_path: Path) -> None:
    pp_to_hg(runs(dims), tmp_path / "hg")
    assert load_file(tmp_path / "hg" / "model.safetensors").keys() == load_file(tied / "model.safetensors").keys()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "hg" / name).read_bytes() == (tied / name).read_bytes()
    ids = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        trained = load_model(runs(dims))(ids)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hg", dtype=torch.float32)(ids).logits
        untrained = load_model(tied)(ids)
    torch.testing.assert_close(exported, trained, atol=1e-5, rtol=0)
    assert (trained - untrained).abs().max() > 1e-2


@pytest.mark.parametrize("dims", EVERYWHERE, ids=str)
def test_the_run_exports_what_pp_to_hg_would(dims: tuple[int, int], runs: Runs, tmp_path: Path) -> None:
    pp_to_hg(runs(dims), tmp_path / "hg", options=ExportOptions(add_card=partial(add_to_export, RunConfig.options)))
    exported = runs(dims) / "hf"
    files = read_weights(exported)
    assert len(files) == dims[0] * dims[1], "each rank its own"
    assert_same_bits(joined(files), joined(read_weights(tmp_path / "hg")))
    assert side_files(exported) == side_files(tmp_path / "hg")
    AutoModelForCausalLM.from_pretrained(exported)


def test_round_trip_after_training_is_bit_for_bit(runs: Runs, tmp_path: Path) -> None:
    pp_to_hg(runs((2, 1)), tmp_path / "hg")
    hg_to_pp(tmp_path / "hg", tmp_path / "pp")
    pp_to_hg(tmp_path / "pp", tmp_path / "hg2")
    first = (tmp_path / "hg" / "model.safetensors").read_bytes()
    assert (tmp_path / "hg2" / "model.safetensors").read_bytes() == first


@pytest.mark.longest
def test_the_resolved_config_runs_again(runs: Runs, tmp_path: Path) -> None:
    again = ("train_ds.py", "--config", runs((2, 1)) / "config.yml", f"save_path={tmp_path / 'again'}")
    result = deepspeed(2, *again)
    assert result.returncode == 0, result.stderr[-3000:]
    assert [line["loss"] for line in metrics(tmp_path / "again")] == [line["loss"] for line in metrics(runs((2, 1)))]


OPTIONS: dict[str, Any] = {
    "from_scratch": True,
    "n_epochs": 3,
    "optimizer": {"type": "Lion", "params": {"lr": 3.0e-4, "weight_decay": 0.1}, "no_wd_kws": ["norm", "embed"]},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "cos_min_ratio": 0.1}},
    "aux_max_z_loss": {"weight": 1.0e-2},
    "use_grad_ckpt": True,
    "prompt_format": "plain",
    "dataloader_drop_last": True,
    "zero_optimization": {"stage": 0},
    "gradient_clipping": 0.05,
}


@pytest.mark.slow
def test_every_option_at_once_agrees_between_one_and_two_stages(folder: Path, records: Path, tied: Path) -> None:
    """Fresh weights of a folder that has none, Lion, z-loss, recomputation, clipping without ZeRO."""
    shutil.copytree(tied, folder / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    losses = {}
    for dims in ((1, 1), (2, 1)):
        path = write_config(
            folder / f"options{dims[0]}.yml",
            model_path=str(folder / "bare"),
            data_path=[str(records), str(records)],
            model_topo=topology(dims),
            **OPTIONS,
        )
        result = supervised(dims[0], "train_ds.py", "--config", path, "max_seq_len=160")
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        assert "cut to max_seq_len 160" in result.stdout
        lines = metrics(path.with_suffix(""))
        losses[dims] = torch.tensor([line["loss"] for line in lines])
        lrs = [line["lr"] for line in lines]
        assert 0 < lrs[0] < lrs[1] == pytest.approx(3.0e-4)
        assert lrs[-1] == pytest.approx(3.0e-5)
    torch.testing.assert_close(losses[2, 1], losses[1, 1], atol=1e-4, rtol=0)
    assert losses[1, 1][-1] < losses[1, 1][0]
    exported = folder / "options_hg"
    pp_to_hg(folder / "options2", exported)
    AutoModelForCausalLM.from_pretrained(exported)


@pytest.mark.slow
def test_bf16_on_two_stages_learns_from_the_pipeline_layout(
    ranks: Ranks, folder: Path, records: Path, tied: Path
) -> None:
    hg_to_pp(tied, folder / "tied_pp")
    path = write_config(
        folder / "bf16.yml",
        model_path=str(folder / "tied_pp"),
        data_path=str(records),
        n_epoches=8,
        bf16={"enabled": True},
        model_topo=topology((2, 1), [3, 2]),
    )
    assert ranks.train(2, path)["error"] is None
    losses = [line["loss"] for line in metrics(path.with_suffix(""))]
    assert losses[-1] < 0.9 * losses[0], losses
    # Logged in fp32: a bf16 loss has at most eight significant bits.
    assert any(loss != torch.tensor(loss).bfloat16().item() for loss in losses)
    assert load_model(path.with_suffix("")).head.lm_head.weight.dtype == torch.bfloat16
    pp_to_hg(path.with_suffix(""), folder / "bf16_hg")
    exported = load_file(folder / "bf16_hg" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}, "the dtype of the original"
