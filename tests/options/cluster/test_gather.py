"""Which files `convert_model.py gather` copies from which host, and which hosts it accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.errors import CheckpointError
from options.cluster.gather import hosts_of, sources_of
from tests.training.checkpoint.test_folder import DATA, TOPOLOGY
from training.checkpoint.folder import RECORD, CheckpointRecord, FileRecord, fault, file_record

ONE, TWO = FileRecord(size=1, crc32=1), FileRecord(size=2, crc32=2)
SPREAD = CheckpointRecord(
    step=4,
    topology=TOPOLOGY,
    data=DATA,
    hosts={"node1": {"layer_00": ONE, "config.json": ONE}, "node2": {"layer_01": TWO, "config.json": ONE}},
    host="node1",
)


def test_a_file_of_several_hosts_comes_from_the_first() -> None:
    reached = {"node2": "10.0.0.2", "node1": "10.0.0.1"}
    assert sources_of(SPREAD, reached) == {
        "layer_00": ("10.0.0.1", ONE),
        "config.json": ("10.0.0.1", ONE),
        "layer_01": ("10.0.0.2", TWO),
    }


def test_a_host_that_is_not_among_them_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"^layer_00: was written on host node1; expected it among the hosts$"):
        sources_of(SPREAD, {"node2": "node2"})


def test_hosts_of_a_list_and_of_a_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("# mine\nnode1 slots=2\n\nme@10.0.0.2 slots=2  # later\n")
    assert hosts_of(None, str(tmp_path / "hostfile")) == ["node1", "me@10.0.0.2"]
    assert hosts_of("node1,[fe80::1%eth0]", None) == ["node1", "[fe80::1%eth0]"]


@pytest.mark.parametrize("listed", ["", "node1,", "-oProxyCommand=touch", "node1 node2", "a;b", "$(a)", "a\nb"])
def test_what_is_no_host_is_refused(listed: str) -> None:
    with pytest.raises(CheckpointError, match="no name of a host"):
        hosts_of(listed, None)


@pytest.mark.parametrize("name", ["../layer_00", "/etc/passwd", "", ".."])
def test_a_name_that_leads_out_of_the_folder_is_damage(name: str) -> None:
    record = SPREAD.model_copy(update={"hosts": {"node1": {name: ONE}}})
    whole = record.model_copy(update={"crc32": record.checksum()})
    assert CheckpointRecord.parse(whole.model_dump_json(exclude_unset=True).encode()) is None


def test_a_folder_has_the_files_of_its_host(tmp_path: Path) -> None:
    (tmp_path / "layer_00").write_text("weights")
    files = {"layer_00": file_record(tmp_path / "layer_00")}
    SPREAD.model_copy(update={"hosts": {"node1": files, "node2": {"layer_01": TWO}}}).write(tmp_path)
    assert fault(tmp_path) is None
    assert '"files"' not in (tmp_path / RECORD).read_text()
    (tmp_path / "layer_00").unlink()
    assert fault(tmp_path) == "layer_00 is missing"
