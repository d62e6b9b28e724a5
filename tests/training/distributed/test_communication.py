"""Process groups ask nobody but their members, and a failed wait counts as an error of communication."""

from __future__ import annotations

import json
import operator
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from tests.conftest import ROOT
from training.distributed.communication import wait
from training.distributed.rank_monitor import failure_of

# Makes the grid of 512 processes in one, with torch's own stand-in for a network. What splits NCCL's communicator needs
# a GPU and asks all processes each time; its stand-in counts.
GRID = """
import contextlib, io, json
import torch
from deepspeed.comm import comm
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from training.distributed.communication import among_members

class Communicator:
    asked = 0
    def perform_nocolor_split(self, device):
        Communicator.asked += 1

def grid():
    Communicator.asked, before = 0, len(distributed_c10d._world.pg_map)
    with contextlib.redirect_stdout(io.StringIO()):
        made = PipelineParallelGrid(topology=ProcessTopology(axes=["pipe", "data"], dims=[16, 32]))
    ranks = [torch.distributed.get_process_group_ranks(group) for group in (made.dp_proc_group, made.pp_proc_group)]
    return Communicator.asked, len(distributed_c10d._world.pg_map) - before, ranks

torch.distributed.init_process_group("fake", rank=70, world_size=512, store=FakeStore())
comm.cdb = TorchBackend.__new__(TorchBackend)
comm.cdb.initialized = True
distributed_c10d._get_split_source = lambda world: Communicator()
world = torch.distributed.group.WORLD
world.bound_device_id = torch.device("cuda", 6)
with_all = grid()
with among_members():
    alone = grid()
assert world.bound_device_id == torch.device("cuda", 6)
print(json.dumps([with_all, alone]))
"""


@pytest.mark.slow
def test_a_grid_of_512_processes_asks_for_nobody_else() -> None:
    command = [sys.executable, "-c", GRID]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (asked, made, members), (asked_alone, made_alone, members_alone) = json.loads(done.stdout.splitlines()[-1])
    groups = 32 + 16 + 32 + 512  # of replicas, of stages, of pipelines, of one process each
    assert (made, asked) == (4, groups - 4)
    assert (made_alone, asked_alone) == (4, 0)
    assert members_alone == members == [list(range(64, 96)), list(range(6, 512, 32))]


class Broken:
    """Fails outside of Python, as `Work.wait` does if a connection breaks."""

    wait = partial(operator.truediv, 1, 0)


def test_a_failed_wait_is_an_error_of_communication() -> None:
    work: Any = Broken()
    with pytest.raises(ZeroDivisionError) as failed:
        wait(work)
    assert failure_of(failed.value).waiting
    with pytest.raises(ZeroDivisionError) as failed:
        work.wait()
    assert not failure_of(failed.value).waiting
    wait(None)
