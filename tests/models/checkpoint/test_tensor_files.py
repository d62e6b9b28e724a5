"""Shows that a weight file's pickle never runs code, that its damage is an error of one line, and NaN a warning."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models import load_model
from tests.models.command_line import convert
from tests.models.helpers import (
    CONVERTERS,
    LAYOUTS,
    assert_same_bits,
    change_weights,
    copy_of,
    error_line,
    joined,
    read_weights,
    write_weights,
)

QUERY, FUSED = "model.layers.1.self_attn.q_proj.weight", "self_attention.query_key_value.bias"
INFINITE = torch.tensor([torch.inf, -torch.inf])
FILES = {"huggingface": "pytorch_model.bin", "pipeline": "layer_02-model_states.pt"}


@pytest.fixture(params=LAYOUTS)
def archive(request: pytest.FixtureRequest, both_layouts: dict[str, Path], tmp_path: Path) -> tuple[str, Path]:
    """A layout, and a torch archive in a folder of it that a test may damage."""
    folder = copy_of(both_layouts[request.param], tmp_path / "bad")
    if request.param == "huggingface":
        write_weights(folder, {FILES["huggingface"]: joined(read_weights(folder))})
    return request.param, folder / FILES[request.param]


class RunsCode:
    """A pickle of it makes the reader call os.mkdir, as an attacker would call something worse."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_that_would_run_code_is_refused(archive: tuple[str, Path], zipped: bool, tmp_path: Path) -> None:
    layout, path = archive
    marker = tmp_path / "marker"
    trap = {"weight": torch.ones(1), "trap": RunsCode(marker)}
    torch.save(trap, path, _use_new_zipfile_serialization=zipped)
    for use in (lambda: load_model(path.parent), lambda: CONVERTERS[layout](path.parent, tmp_path / "out")):
        line = error_line(use)
        assert path.name in line and "refused" in line
        assert not marker.exists()
    run, arguments = RunsCode(marker).__reduce__()
    run(*arguments)
    assert marker.exists(), "the trap is not armed, so the test shows nothing"


@pytest.mark.parametrize("zipped", [True, False])
def test_bin_cut_anywhere_is_an_error_of_one_line(both_layouts: dict[str, Path], zipped: bool, tmp_path: Path) -> None:
    folder = copy_of(both_layouts["huggingface"], tmp_path / "bad")
    tensors, path = joined(read_weights(folder)), folder / "pytorch_model.bin"
    write_weights(folder, {})
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    for length in [*range(0, 400, 7), len(whole) // 2, len(whole) - 100, len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert str(path) in error_line(lambda: load_model(folder))


def test_nan_is_warned_of_and_kept_and_infinities_are_only_kept(
    both_layouts: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, layers = copy_of(both_layouts["huggingface"], tmp_path / "folder"), tmp_path / "layers"
    change_weights(folder, lambda tensors: [t.view(-1)[:2].copy_(INFINITE) for t in tensors.values()])
    change_weights(folder, lambda tensors: [t.view(-1)[2].fill_(torch.nan) for n, t in tensors.items() if n == QUERY])
    places = (f"{folder}: {QUERY} ", f"{layers / 'layer_02-model_states.pt'}: block.self_attn.q_proj.weight ")
    conversions = [("hg_to_pp", folder, layers), ("pp_to_hg", layers, tmp_path / "exported")]
    for place, conversion in zip(places, conversions, strict=True):
        code, lines = convert(*conversion, "--verify")
        assert code == 0
        assert [line.startswith(f"warning: {place}") for line in set(lines)] == [True]
    assert_same_bits(joined(read_weights(tmp_path / "exported")), joined(read_weights(folder)))

    for place, model in zip(places, (folder, layers), strict=True):
        caplog.clear()
        load_model(model)
        assert [message.startswith(f"warning: {place}") for message in caplog.messages] == [True]


def test_nan_in_a_fused_weight_is_warned_of(make_case: Callable[..., Path], tmp_path: Path) -> None:
    folder, name = make_case("chatglm3"), f"transformer.encoder.layers.1.{FUSED}"
    change_weights(folder, lambda tensors: tensors[name].view(-1)[-1].fill_(torch.nan))
    code, (line,) = convert("hg_to_pp", folder, tmp_path / "layers")
    assert code == 0 and line.startswith(f"warning: {folder}: {name}")


STRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": Tensor.to_sparse,
    "sparse-rows": Tensor.to_sparse_csr,
    "meta": lambda tensor: tensor.to("meta"),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor, tensor]),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of kinds that it calls unfinished
@pytest.mark.parametrize("kind", STRANGE)
def test_tensor_that_is_no_plain_one_is_refused_by_name(kind: str, archive: tuple[str, Path], tmp_path: Path) -> None:
    layout, path = archive
    state = torch.load(path, weights_only=True)
    name = next(name for name in state if name.endswith("q_proj.weight"))
    torch.save(state | {name: STRANGE[kind](state[name].float())}, path)
    for use in (lambda: load_model(path.parent), lambda: CONVERTERS[layout](path.parent, tmp_path / "out")):
        line = error_line(use)
        assert str(path) in line
    assert name in line or kind in ("sparse-rows", "quantized")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_weights_of_eight_bits_pass_through_unchanged(
    dtype: torch.dtype, file: str, llama: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copy_of(llama(), tmp_path / "small")
    tensors = {name: tensor.to(dtype) for name, tensor in joined(read_weights(folder)).items()}
    tensors[QUERY].view(torch.uint8)[0, 0] = 0x7F  # a NaN in both
    write_weights(folder, {file: tensors})
    code, (line,) = convert("hg_to_pp", folder, tmp_path / "layers")
    assert code == 0 and QUERY in line
    assert convert("pp_to_hg", tmp_path / "layers", tmp_path / "exported")[0] == 0
    assert_same_bits(joined(read_weights(tmp_path / "exported")), tensors)
