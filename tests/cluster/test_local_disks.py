"""`storage: local` on two hosts: a run resumes from the parts of a checkpoint on their disks, and `gather` joins them.

tests/training/checkpoint/test_local_disks.py has all topologies and refusals, on one host.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from models.conversion.to_huggingface import pp_to_hg
from tests.cluster.hosts import Host, hostfile_of
from tests.cluster.test_two_hosts import configured, trained
from tests.launching import deepspeed, error_lines, metrics, run, topology, write_config
from tests.training.checkpoint.test_folder import flip
from training.checkpoint.folder import RECORD, CheckpointRecord, FileRecord

pytestmark = pytest.mark.launched

WEIGHTS = "model.safetensors"
RUN = "/mnt/run"  # on each host's own disk
LOCAL: dict[str, Any] = {"storage": "local", "save_interval": 2, "cache_dir": "/mnt/cache"}


def converted(host: Host, *words: str | Path) -> Any:
    """Run `convert_model.py` on a host."""
    return run(*host.enter(sys.executable, "convert_model.py", *words))


def ended_well(result: Any) -> str:
    assert result.returncode == 0, result.stdout + result.stderr
    return str(result.stdout)


@pytest.mark.longest
def test_a_run_on_two_disks_goes_on_and_comes_together(hosts: list[Host], disks: list[Path], tmp_path: Path) -> None:
    configured(disks, tmp_path / "shared")
    ended_well(trained(hosts, tmp_path))
    configured(disks, RUN, **LOCAL | {"max_steps": 2})
    ended_well(trained(hosts, tmp_path))
    configured(disks, RUN, **LOCAL)
    assert "resumed: /mnt/run/step-000002, after step 2" in ended_well(trained(hosts, tmp_path))
    # To rounding: where ranks have several threads, last bits once differed. Tests with one thread ask for every bit.
    assert_close(numbers(disks[0] / "run"), numbers(tmp_path / "shared"), rtol=1e-6, atol=0)
    assert not (disks[1] / "run/metrics.jsonl").exists()
    assert [len(list((disk / "cache").glob("**/samples*"))) > 0 for disk in disks] == [True, True]
    spread, whole = f"{RUN}/step-000004", tmp_path / "whole"
    refused = converted(hosts[1], "pp_to_hg", "--input-path", spread, "--save-path", tmp_path / "part")
    (line,) = error_lines(refused)
    assert "layer_00-model_states.pt: not here, as it was written on host node1; expected" in line
    words = "gather", "--input-path", spread, "--save-path", whole
    ended_well(converted(hosts[0], *words, "--hostfile", hostfile_of(hosts, 1, tmp_path / "hostfile")))
    assert "host" not in (whole / RECORD).read_text()
    assert layers(whole) == {name: file for disk in disks for name, file in layers(disk / "run/step-000004").items()}
    exported, expected = tmp_path / "exported", tmp_path / "expected"
    ended_well(converted(hosts[0], "pp_to_hg", "--input-path", whole, "--save-path", exported))
    pp_to_hg(tmp_path / "shared", expected)
    assert_close(load_file(exported / WEIGHTS), load_file(expected / WEIGHTS), atol=2e-6, rtol=0)


def numbers(run_folder: Path) -> list[tuple[float, float]]:
    """The loss and the gradient's norm of each step."""
    return [(line["loss"], line["grad_norm"]) for line in metrics(run_folder)]


def layers(checkpoint: Path) -> dict[str, FileRecord]:
    """Read the records of a checkpoint's layer files, of this disk if there are several."""
    record = CheckpointRecord.read(checkpoint)
    assert record is not None
    return {name: file for name, file in record.here.items() if name.startswith("layer_")}


@pytest.mark.longest
def test_replicas_on_two_disks_go_on_with_fewer(hosts: list[Host], disks: list[Path], tmp_path: Path) -> None:
    """Each host has a stage with both replicas, and later one."""
    configured(disks, RUN, model_topo=topology((2, 2)), **LOCAL | {"max_steps": 2})
    ended_well(trained(hosts, tmp_path, slots=2))
    configured(disks, RUN, **LOCAL)
    assert "resumed: /mnt/run/step-000002, after step 2" in ended_well(trained(hosts, tmp_path))
    whole = tmp_path / "whole"
    words = "gather", "--input-path", f"{RUN}/step-000002", "--save-path", whole
    ended_well(converted(hosts[1], *words, "--hosts", "node2,node1"))
    (line,) = error_lines(converted(hosts[0], *words, "--overwrite", "--hosts", "node1,node9"))
    assert line.startswith("error: host node9: ssh: ")
    flip(disks[1] / "run/step-000002/layer_03-model_states.pt")
    (line,) = error_lines(converted(hosts[0], *words, "--overwrite", "--hosts", "node1,10.77.0.2"))
    assert line.startswith(f"error: host 10.77.0.2: {RUN}/step-000002/layer_03-model_states.pt: damaged: ")
    alone = write_config(
        tmp_path / "alone.yml",
        model_path=str(disks[0] / "model"),
        data_path=str(disks[0] / "records.json"),
        resume=str(whole),
        max_steps=4,
    )
    assert f"resumed: {whole}, after step 2" in ended_well(deepspeed(1, "train_ds.py", "--config", alone))
    found = [line["loss"] for line in metrics(tmp_path / "alone")]
    assert found == pytest.approx([line["loss"] for line in metrics(disks[0] / "run")][2:], rel=1e-5)
