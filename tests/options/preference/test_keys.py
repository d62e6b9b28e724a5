"""The section `preference`: defaults of each loss, what a loss does not use, and what contradicts it."""

from __future__ import annotations

from typing import Any

import pytest

from data.settings import Wanted
from options import RunConfig
from options.preference.keys import PreferenceSection
from options.preference.losses import LOSSES, PairLoss

PATHS = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 8}


def config(**keys: Any) -> RunConfig:
    return RunConfig.model_validate(PATHS | {"optimizer": {"params": {"lr": 1e-5}}} | {"preference": {}} | keys)


UNPAIRED = ("kto", "apo_zero_unpaired")


@pytest.mark.parametrize("loss", [*LOSSES, *UNPAIRED])
def test_every_loss_is_an_objective_and_is_read_again_as_written(loss: str) -> None:
    section = PreferenceSection.model_validate({"loss": loss})
    objective = PairLoss(**section.objective)
    assert objective.length_normalised == (loss not in ("dpo", "cdpo", *UNPAIRED))
    assert (objective.label_smoothing, objective.gamma) == (0.1 * (loss == "cdpo"), 0.5 * (loss == "simpo"))
    assert objective.sft_weight == (loss == "orpo")
    assert ("desirable_weight" in section.objective) == section.unpaired == (loss in UNPAIRED)
    assert objective.desirable_weight == objective.undesirable_weight == 1
    assert PreferenceSection.model_validate(section.model_dump()) == section


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"loss": "ppo"}, "preference.loss"),
        ({"loss": "dpo", "gamma": 0.3}, "gamma: expected only with loss: simpo"),
        ({"loss": "simpo", "label_smoothing": 0.3}, "label_smoothing: expected only with loss: cdpo"),
        ({"loss": "dpo", "beta": 0}, "preference.beta"),
        ({"loss": "dpo", "center_weight": 0.1}, "center_weight: expected only with loss: reward"),
        ({"loss": "reward", "beta": 0.5}, "a reward model has no use for them"),
        ({"loss": "dpo", "desirable_weight": 1.0}, "desirable_weight: expected only with loss: kto"),
        ({"loss": "reward", "undesirable_weight": 2}, "undesirable_weight: expected only with loss: kto"),
        ({"loss": "kto", "undesirable_weight": 0}, "preference.undesirable_weight"),
        ({"loss": "kto", "sft_weight": 0.1}, "kto has no use for them"),
        ({"loss": "kto", "length_normalised": True}, "kto has no use for them"),
        ({"loss": "kto", "gamma": 0.1}, "gamma: expected only with loss: simpo"),
    ],
)
def test_what_a_loss_does_not_use_is_refused(section: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        config(preference=section)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"mask": "all"}, "mask: "),
        ({"from_scratch": True}, "from_scratch: "),
        ({"aux_max_z_loss": {"weight": 1e-4}}, "aux_max_z_loss.weight: "),
        ({"labels": ["a", "b"]}, "labels: a classifier learns from classes"),
        ({"labels": ["a"], "preference": None}, "labels: expected at least two different names, found a"),
        ({"labels": ["a", "a"], "preference": None}, "labels: expected at least two different names, found a, a"),
        ({"labels": ["a", "b"], "preference": None, "aux_max_z_loss": {"weight": 1e-4}}, "aux_max_z_loss.weight: "),
    ],
)
def test_what_contradicts_preferences_is_refused(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        config(**keys)


def test_the_pass_of_kto_in_each_step_is_not_planned() -> None:
    (line,) = config(preference={"loss": "kto"}).objective.unplanned()
    assert line == "preference.loss: kto takes a forward pass more in each step, which is not planned"
    assert not config(preference={"loss": "apo_zero_unpaired"}).objective.unplanned()


def test_a_marked_answer_is_one_document() -> None:
    pairs, marked = config(), config(preference={"loss": "kto"})
    assert (pairs.objective.wanted, marked.objective.wanted) == (Wanted("pairs"), Wanted("marked"))
    assert pairs.sample_limit == 2 * marked.sample_limit == 2 * marked.max_seq_len
