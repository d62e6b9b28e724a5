"""A run with DeepSpeed's compiled AdamW and Lion on the CPU equals the one without offload.

Slow, because DeepSpeed compiles each of them at the first use, for about a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import write_records
from tests.launching import deepspeed, metrics, topology, write_config

pytestmark = [pytest.mark.launched, pytest.mark.longest]  # test_zero.py has an offload in each run of the tests

OFFLOAD = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1.0e-3, "eps": 1.0e-6, "weight_decay": 0.01}},
    "Lion": {"type": "Lion", "params": {"lr": 2.0e-4, "betas": [0.95, 0.98], "weight_decay": 0.01}},
}


@pytest.mark.parametrize("optimizer", ["AdamW", "Lion"])
def test_an_offloaded_optimizer_takes_the_same_steps(
    optimizer: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    data = tmp_path / "records.json"
    write_records(data, 24)
    model = make_checkpoint("llama", tie_word_embeddings=True)
    losses = {}
    for name, keys in (("plain", {}), ("offloaded", OFFLOAD)):
        path = write_config(
            tmp_path / f"{name}.yml",
            model_path=str(model),
            data_path=str(data),
            n_epoches=2,
            optimizer=OPTIMIZERS[optimizer],
            model_topo=topology((2, 1), [3, 2]),
            **keys,
        )
        result = deepspeed(2, "train_ds.py", "--config", path)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        losses[name] = torch.tensor([line["loss"] for line in metrics(path.with_suffix(""))])
    assert losses["plain"][-1] < losses["plain"][0]
    torch.testing.assert_close(losses["offloaded"], losses["plain"], atol=1e-4, rtol=0)
