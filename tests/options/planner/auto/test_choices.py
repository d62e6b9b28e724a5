"""Chosen values and the user's own: which of them count, and the file that they make."""

from __future__ import annotations

import pytest

from options import RunConfig
from options.planner.auto.choices import Choices
from training.errors import ConfigError

PATHS = {"model_path": "m", "data_path": ["d"], "save_path": "s"}


def choices(*words: str) -> Choices:
    made = Choices(RunConfig, list(words))
    for key, value in PATHS.items():
        made.add(key, value, "given")
    return made


def test_the_users_own_go_before_what_is_chosen_and_are_marked() -> None:
    made = choices("optimizer.params.lr=0.5", "n_epochs=7")
    made.add("train_batch_size", 8, "eight")
    made.add("n_epoches", 3, "three")
    made.add("optimizer.params.lr", 0.1, "a tenth")
    made.add("optimizer.params.betas", [0.9, 0.95], "usual")
    assert (made.config().optimizer.params, made.config().n_epoches) == ({"lr": 0.5, "betas": [0.9, 0.95]}, 7)
    assert made.as_yaml(["what", "how"]).splitlines() == [
        "# what",
        "# how",
        "",
        "model_path: m  # given",
        "data_path: [d]  # given",
        "save_path: s  # given",
        "train_batch_size: 8  # eight",
        "n_epoches: 7  # yours",
        "optimizer:",
        "  params:",
        "    lr: 0.5  # yours",
        "    betas: [0.9, 0.95]  # usual",
    ]
    assert made.is_own("n_epoches") and made.is_own("optimizer") and made.is_own("optimizer.params.lr")
    assert not made.is_own("optimizer.params.betas") and not made.is_own("opt")


def test_a_whole_section_of_the_users_takes_the_place_of_what_was_chosen_in_it() -> None:
    made = choices("optimizer={type: SGD, params: {lr: 1.0}}", "bf16={}")
    made.add("bf16.enabled", True, "fast")
    made.add("optimizer.type", "AdamW", "usual")
    made.add("optimizer.params.betas", [0.9, 0.95], "usual")
    config = made.config(train_batch_size=1)
    assert (config.optimizer.type, config.optimizer.params, config.bf16.enabled) == ("SGD", {"lr": 1.0}, False)
    assert "usual" not in made.as_yaml([]) and "bf16: {}  # yours" in made.as_yaml([])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("seed", "command line: 'seed': expected key.sub=value"),
        ("optimizr.type=SGD", "command line: unknown key optimizr; did you mean optimizer?"),
        ("n_epoches=0", "command line: n_epoches: expected at least 1, found 0"),
        ("model_topo.parts=[1, 2]", "command line: model_topo.parts: expected one entry for each of 1 stages, found"),
    ],
)
def test_a_word_that_makes_no_config_is_refused_in_one_line(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choices(word).config(train_batch_size=1)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_reason_ends_with_its_line() -> None:
    made = choices()
    made.add("seed", 1, "one\nsave_path: /elsewhere")
    assert "\nsave_path: /elsewhere" not in made.as_yaml(["a\nsave_path: /elsewhere"])
