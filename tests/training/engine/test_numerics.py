"""`deterministic`, `tf32` and `fp8`: what they set, and what is logged of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from training.config.keys import TrainConfig
from training.engine import numerics
from training.engine.numerics import describe_numerics, set_numerics
from training.errors import EXIT_CODE, describe_error
from training.metrics.devices import parse_devices

KEYS = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 8}


def config_of(**keys: Any) -> TrainConfig:
    return TrainConfig.model_validate(KEYS | keys)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the process as it was."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    yield
    set_numerics(config_of())
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def test_deterministic_asks_torch_cublas_and_flash_attention() -> None:
    set_numerics(config_of(deterministic=True))
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    set_numerics(config_of())
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_an_order_is_one_line() -> None:
    set_numerics(config_of(deterministic=True))
    with pytest.raises(RuntimeError) as refused:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    code, line, report = describe_error(refused.value)
    assert (code, report) == (EXIT_CODE, "")
    assert line == "deterministic: torch has no put_ that sums in the same order; expected false"


BF16 = {"bf16": {"enabled": True}}
ORDERED = "deterministic: sums have one order, so a resumed run is equal to the last bit"
SLOWER = "; attention's backward pass is slower for it"
LOST = (
    "warning: {0}.{0}_master_weights_and_grads: the weights are kept in {0}, so updates below 1/{1} of a weight are "
    "lost; leave it out for fp32 masters"
)
IN_FP32 = "products: fp32; with tf32: true they are up to 7 times as fast, and have 10 bits"


@pytest.mark.parametrize(
    ("keys", "on_gpu", "lines"),
    [
        ({}, False, ["threads: 3"]),
        ({"deterministic": True}, False, [ORDERED, "threads: 3"]),
        ({"tf32": True}, False, ["threads: 3", "warning: tf32 is without effect, as there is no GPU"]),
        ({"deterministic": True}, True, [ORDERED + SLOWER, IN_FP32]),
        ({}, True, [IN_FP32]),
        ({"tf32": True}, True, ["products: TF32, with 10 bits of each factor"]),
        (BF16, True, []),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, True, [LOST.format("bf16", 256)]),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, True, [LOST.format("fp16", 2048)]),
        (
            BF16 | {"fp8": {"enabled": True}},
            True,
            ["products: fp8 in the blocks' linear layers, bf16 elsewhere; weights and their gradients are bf16"],
        ),
    ],
)
def test_products_are_described_and_tf32_is_for_gpus(
    keys: dict[str, Any], on_gpu: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(numerics, "this_device", lambda: parse_devices("H100")[1])
    config = config_of(**keys)
    assert describe_numerics(config) == lines
    set_numerics(config)
    assert torch.get_float32_matmul_precision() == ("high" if config.tf32 and on_gpu else "highest")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_tf32_in_16_bits_is_refused(precision: str) -> None:
    with pytest.raises(ValueError, match="tf32: 16-bit products do not use it"):
        config_of(tf32=True, **{precision: {"enabled": True}})
