"""Exactness as a table: loss and gradients are those of the global batch, however it is cut and spread.

Every row runs the same eight samples, of 5 to 60 tokens, through the real launcher and must give the loss, the norm and
every gradient of one process that runs them one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from data.sample_set import Sample
from data.settings import Packing
from models import load_model
from tests.cases import tiered
from tests.matrix import Outcome, step, take
from tests.ranks import Ranks, write_samples
from tests.training.engine.test_gradients import outcome_of

pytestmark = pytest.mark.launched

TOLERANCE = 1e-5  # relative, in fp32


class Row(NamedTuple):
    """A way to cut a batch.

    Attributes:
        dims: stages and replicas.
        micro_batch: samples.
        parts: layers per stage, for a pipeline.
        zero_stage: a pipeline has 0 or 1; without parts it is train_ds_zero.py.
        batch: train_batch_size; where it is no 8, the batch is an epoch's last one, which is smaller.
        packing: see `data.loader.Loader`; rows are of 64 tokens.
    """

    dims: tuple[int, int]
    micro_batch: int
    parts: list[int]
    zero_stage: int = 1
    batch: int = 8
    packing: Packing = False

    @property
    def name(self) -> str:
        parts = "+".join(map(str, self.parts)) or "zero"
        cut = f"micro{self.micro_batch}of{self.batch}-{self.packing or 'padded'}"
        return f"{self.dims[0]}x{self.dims[1]}-{parts}-stage{self.zero_stage}-{cut}"


PACKED: list[Packing] = ["batch", "dataset"]
ONE, TWO, FOUR = [5], [3, 2], [1, 2, 1, 1]
TABLE = [
    *(Row((1, 1), micro, ONE) for micro in (1, 2, 4, 8)),
    *(Row((2, 1), micro, parts) for micro in (1, 4) for parts in (TWO, [1, 4], [4, 1])),
    *(Row((1, 2), micro, ONE) for micro in (1, 4)),
    *(Row((4, 1), micro, parts) for micro in (2, 8) for parts in (FOUR, [2, 1, 1, 1])),
    *(Row((2, 2), micro, parts) for micro in (1, 4) for parts in (TWO, [1, 4])),
    *(Row((1, 4), micro, ONE) for micro in (1, 2)),
    *(Row(dims, 2, parts, 0) for dims, parts in (((1, 1), ONE), ((2, 1), TWO), ((2, 2), TWO), ((4, 1), FOUR))),
    *(Row((1, 1), micro, ONE, packing=packing) for micro in (1, 2) for packing in PACKED),
    *(Row((2, 1), micro, TWO, packing=packing) for micro in (1, 2) for packing in PACKED),
    *(Row((2, 2), micro, TWO, packing=packing) for micro in (1, 2) for packing in PACKED),
    Row((4, 1), 1, FOUR, packing="batch"),
    Row((1, 4), 1, ONE, packing="batch"),
    Row((2, 1), 3, TWO, batch=12),
    Row((1, 2), 3, ONE, batch=12),
    Row((2, 2), 3, TWO, batch=12),
    *(Row((1, replicas), 8 // replicas // 2, [], stage) for replicas in (1, 2, 4) for stage in range(4)),
    *(Row((1, 2), micro, [], stage) for micro in (1, 4) for stage in (2, 3)),
    *(Row((1, 4), 3, [], stage, batch=12) for stage in range(4)),
    *(Row((1, 2), 1, [], stage, packing=packing) for stage in range(4) for packing in PACKED),
]
# Four processes take longest. Of unequal parts each goes with one of the micro-batches, and of ZeRO both ends go with
# packing; `batch` packed into micro-batches of 2 is what `tied-fp32` of tests/training/engine/test_gradients.py trains.
QUICK = ["1x2-5-stage1-micro1of8-padded", "1x1-5-stage0-micro2of8-padded", "1x1-5-stage1-micro2of8-dataset"]
QUICK += ["2x1-3+2-stage1-micro1of8-batch", "2x1-3+2-stage1-micro3of12-padded"]
QUICK += ["1x2-zero-stage0-micro2of8-padded", "1x2-zero-stage3-micro2of8-padded"]
SLOW = ["1x1-5-stage1-micro2of8-padded", "1x1-5-stage1-micro8of8-padded", "2x1-3+2-stage1-micro1of8-padded"]
SLOW += ["2x1-4+1-stage1-micro4of8-padded", "4x1-1+2+1+1-stage1-micro2of8-padded", "1x4-5-stage1-micro2of8-padded"]
SLOW += ["2x1-3+2-stage0-micro2of8-padded", "2x1-3+2-stage1-micro1of8-dataset", "2x2-3+2-stage1-micro2of8-dataset"]
SLOW += ["1x2-5-stage1-micro3of12-padded", "1x1-zero-stage3-micro4of8-padded", "1x2-zero-stage1-micro2of8-padded"]
SLOW += ["1x2-zero-stage2-micro1of8-padded", "1x2-zero-stage3-micro4of8-padded"]
SLOW += ["1x2-zero-stage0-micro1of8-dataset", "1x2-zero-stage3-micro1of8-batch"]


@pytest.fixture(scope="module")
def model(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exactness")


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    return write_samples(folder)


@pytest.fixture(scope="module")
def expected(model: Path, samples: list[Sample]) -> Outcome:
    return outcome_of(load_model(model, torch.float32), samples, micro_batch=2, row_length=None)


@pytest.fixture(scope="module")
def outcomes(ranks: Ranks, folder: Path, model: Path, samples: list[Sample], asked: set[str]) -> dict[str, Outcome]:
    """Those of every row that this session asks for."""
    del samples  # already on disk
    return take(ranks, [described(row, model, folder) for row in TABLE if row.name in asked], folder)


def described(row: Row, model: Path, folder: Path) -> dict[str, Any]:
    sharding = {"stage3_param_persistence_threshold": 0} if row.zero_stage == 3 else {}
    keys = {
        "train_batch_size": row.batch,
        "train_micro_batch_size_per_gpu": row.micro_batch,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": row.zero_stage} | sharding,
        "packing": row.packing,
    }
    return step(row.name, row.dims, model, folder, keys, row.parts, "pipeline" if row.parts else "zero")


@pytest.mark.parametrize("row", tiered(TABLE, QUICK, SLOW))
def test_loss_and_gradients_are_those_of_the_global_batch(
    row: Row, outcomes: dict[str, Outcome], expected: Outcome
) -> None:
    found = outcomes[row.name]
    assert found.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    assert found.norm == pytest.approx(expected.norm, rel=TOLERANCE)
    assert expected.gradients.keys() <= found.gradients.keys()
    for name, gradient in expected.gradients.items():
        error = (found.gradients[name] - gradient).norm() / gradient.norm()
        assert error < TOLERANCE, f"{name} differs by {error:.2e}"
