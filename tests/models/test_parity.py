"""Shows that every family computes what transformers computes: logits, gradients, packed rows, recomputation, bf16.

The stored logits, losses and gradient norms of the golden checkpoints come out too, from both layouts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from models import CausalLM, load_model
from models.attention.rope import depends_on_length
from models.loss.micro_batch import token_loss
from models.router import experts_implementation, router_loss
from tests.cases import tiered
from tests.conftest import ORIGINALS
from tests.models.cases import CASES, PADDING
from tests.models.helpers import (
    LAYOUTS,
    change_weights,
    copy_of,
    expected_of,
    gradients,
    in_layout,
    oracle,
    random_ids,
    shifted_loss,
)

LENGTH = 40  # longer than the windows
ALIKE = ["*13b", "baichuan-7b", "*window*", "opt*"]  # in all that is looked at here


class Expected(NamedTuple):
    """What transformers makes of a checkpoint."""

    folder: Path
    ids: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module")
def rough_checkpoint(make_case: Callable[..., Path]) -> Callable[[str], Path]:
    """A case's checkpoint with noise on norms and biases, which are all alike in a fresh model."""

    def roughen(tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            if tensor.dim() == 1:
                tensor.add_(torch.randn(tensor.shape), alpha=0.1)

    def make(name: str) -> Path:
        folder = make_case(name)
        change_weights(folder, roughen)
        return folder

    return make


@pytest.fixture(scope="module", params=tiered(CASES, slow=ALIKE))
def expected(
    request: pytest.FixtureRequest, rough_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Expected:
    folder = rough_checkpoint(request.param)
    ids = random_ids(2, LENGTH)
    ids[1, 20] = PADDING  # whose row of the embedding some families train and others do not
    logits, named = expected_of(folder, ids, tmp_path_factory.mktemp("gradients"))
    assert all(gradient.abs().max() > 0 for gradient in named.values())
    return Expected(folder, ids, logits, named)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_gradients_equal_transformers(expected: Expected, layout: str, tmp_path: Path) -> None:
    model = load_model(in_layout(expected.folder, layout, tmp_path / "layers"))
    logits = model(expected.ids)
    torch.testing.assert_close(logits, expected.logits, atol=1e-5, rtol=0)
    shifted_loss(logits, expected.ids).backward()
    torch.testing.assert_close(gradients(model), expected.gradients, atol=1e-6, rtol=1e-5)


def test_packed_documents_equal_separate_forwards(expected: Expected) -> None:
    model = load_model(expected.folder)
    cuts = [17, 25]  # each row holds two documents, cut in another place
    position_ids = torch.stack([torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)]) for cut in cuts])
    with torch.inference_mode():
        packed = model(expected.ids, position_ids)
        for row, cut in enumerate(cuts):
            for document in (slice(0, cut), slice(cut, LENGTH)):
                alone = model(expected.ids[row : row + 1, document])
                torch.testing.assert_close(packed[row : row + 1, document], alone, atol=1e-5, rtol=0)
        assert not torch.allclose(packed, model(expected.ids), atol=1e-2), "the documents do not matter"


@pytest.mark.parametrize("name", ["phi3-long", "llama-dynamic"])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_short_document_is_computed_alike_beside_long_ones(
    rough_checkpoint: Callable[[str], Path], name: str, padded: bool
) -> None:
    folder = rough_checkpoint(name)
    model = load_model(folder)
    lengths = [LENGTH, 10, LENGTH - 3, 10]  # LENGTH is longer than pretraining's
    documents = [random_ids(1, length) for length in lengths]
    if padded:
        ids = torch.zeros(len(lengths), LENGTH, dtype=torch.long)
        positions = -1 - torch.arange(LENGTH).repeat(len(lengths), 1)
        for row, document in enumerate(documents):
            ids[row, : document.shape[1]] = document[0]
            positions[row, : document.shape[1]] = torch.arange(document.shape[1])
    else:
        ids = torch.cat(documents, dim=1)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.inference_mode():
        together = model(ids, positions)
        found = (
            [together[row, :length] for row, length in enumerate(lengths)]
            if padded
            else list(together[0].split(lengths))
        )
        for document, logits in zip(documents, found, strict=True):
            alone = oracle(folder)(document).logits[0]
            torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)


def test_marked_padding_is_computed_like_any_token(expected: Expected) -> None:
    model = load_model(expected.folder)
    if depends_on_length(model.spec.config):
        pytest.skip("the angles depend on the document's length, and padding does not count; tested above")
    position_ids = torch.arange(LENGTH).expand(2, -1).clone()
    with torch.inference_mode():
        plain = model(expected.ids, position_ids)
        position_ids[0, 31:] = -1 - position_ids[0, 31:]
        torch.testing.assert_close(model(expected.ids, position_ids), plain, atol=0, rtol=0)


def test_recomputation_changes_no_gradient(expected: Expected) -> None:
    model = load_model(expected.folder).train()

    def gradients_of_both_losses() -> dict[str, Tensor]:
        model.zero_grad()
        stream = model.activations(expected.ids)
        loss = shifted_loss(model.head(stream), expected.ids)
        for sums in stream[2:]:
            loss = loss + router_loss(sums, model.spec.config.num_experts_per_tok)
        loss.backward()
        return gradients(model)

    plain = gradients_of_both_losses()
    runs = [0] * len(model.blocks)
    for number, block in enumerate(model.blocks):
        block.recompute = True

        def count(module: nn.Module, arguments: object, number: int = number) -> None:
            runs[number] += 1

        block.block.register_forward_pre_hook(count)
    torch.testing.assert_close(gradients_of_both_losses(), plain, atol=0, rtol=0)
    assert runs == [2] * len(model.blocks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_bf16_loading_gives_bf16_parameters(
    make_checkpoint: Callable[..., Path], stored: torch.dtype, layout: str, tmp_path: Path
) -> None:
    folder = in_layout(make_checkpoint("llama", dtype=stored), layout, tmp_path / "layers")
    model = load_model(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in load_model(folder).parameters()} == {stored}


@pytest.mark.parametrize(
    "case", [case for case in tiered(CASES, slow=ALIKE) if CASES[str(case.id)].model_type not in ORIGINALS]
)
def test_bf16_logits_equal_transformers(case: str, rough_checkpoint: Callable[[str], Path]) -> None:
    folder = rough_checkpoint(case)
    ids = random_ids(2, LENGTH)
    with torch.inference_mode():
        model = oracle(folder, torch.bfloat16)
        model.config._experts_implementation = experts_implementation()  # each of them rounds in its own way
        torch.testing.assert_close(load_model(folder, torch.bfloat16)(ids), model(ids).logits, atol=0, rtol=0)


def test_alibi_biases_keep_near_keys_apart_in_bf16(make_case: Callable[..., Path]) -> None:
    """Far from the start of a row, slopes times positions would round to the same number for neighbours."""
    folder = make_case("baichuan2-13b", dtype=torch.bfloat16)
    ids = random_ids(1, 1000)
    with torch.inference_mode():
        exact, rounded = load_model(folder, torch.float32)(ids), load_model(folder)(ids)
    assert (rounded - exact)[:, -20:].abs().mean() < 0.02 * exact.std()


OWN_CODE = ["baichuan2-7b-tiny", "baichuan2-13b-tiny", "chatglm3-tiny"]
TRANSFORMERS = ["bloom-tiny", "llama-tiny", "llama-untied-tiny", "mixtral-tiny"]
CONFIGS = [(name, "config") for name in OWN_CODE + TRANSFORMERS] + [(name, "config.legacy") for name in TRANSFORMERS]
ROUTER_LOSS_COEF = 0.02


@pytest.fixture(params=CONFIGS, ids="-".join)
def golden(request: pytest.FixtureRequest, shared: Path, tmp_path: Path) -> Path:
    """A copy of a golden checkpoint, with the field names of one age of transformers in config.json."""
    name, config = request.param
    folder = copy_of(shared / "golden" / name, tmp_path / "golden")
    (folder / "config.json").write_bytes((folder / f"{config}.json").read_bytes())
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_values_come_out(golden: Path, layout: str, tmp_path: Path) -> None:
    model = load_model(in_layout(golden, layout, tmp_path / "layers"))
    inputs = load_file(golden / "expected.safetensors")
    wanted = json.loads((golden / "expected.json").read_text())
    stream = model.activations(inputs["input_ids"])
    torch.testing.assert_close(model.head(stream), inputs["logits"], atol=1e-5, rtol=0)

    loss = token_loss(model.head.norm(stream[0]), inputs["labels"], model.head) / wanted["n_loss_tokens"]
    assert loss.item() == pytest.approx(wanted["loss"], abs=1e-5)
    loss.backward(retain_graph=True)
    norms = gradient_norms(model)
    assert norms == pytest.approx(wanted["grad_norms"], rel=1e-5)
    assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(wanted["global_grad_norm"], rel=1e-5)

    assert (len(stream) > 2) == ("aux_loss" in wanted)
    for sums in stream[2:]:
        balance = router_loss(sums, model.spec.config.num_experts_per_tok)
        assert balance.item() == pytest.approx(wanted["aux_loss"], abs=1e-5)
        assert (loss + ROUTER_LOSS_COEF * balance).item() == pytest.approx(wanted["loss_with_aux"], abs=1e-5)
        (ROUTER_LOSS_COEF * balance).backward()
        assert gradient_norms(model) == pytest.approx(wanted["grad_norms_with_aux"], rel=1e-5)


def gradient_norms(model: CausalLM) -> dict[str, float]:
    """By name on disk."""
    return {name: float(gradient.norm()) for name, gradient in gradients(model).items()}
