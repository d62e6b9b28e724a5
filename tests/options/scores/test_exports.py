"""The export of a proof's classifier is what was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from options.proof.exports import compare_exports, plan_exports
from options.proof.samples import EVALUATED
from tests.options.proof.test_exports import LORA, make_small_run


@pytest.mark.parametrize(("keys", "ways"), [({}, 1), ({"lora": LORA}, 2)], ids=["model", "adapter"])
def test_a_sound_export_is_what_was_trained(
    keys: dict[str, Any], ways: int, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "texts.json").write_text(json.dumps([{"text": f"Day {n}", "label": n % 3} for n in range(30)]))
    classes = {"labels": ["a", "b", "c"], "data_path": str(tmp_path / "texts.json")}
    small, checkpoint = make_small_run(make_checkpoint("llama", tie_word_embeddings=False), tmp_path, **classes, **keys)
    planned, lines = plan_exports(small.spec)
    rows = compare_exports(small, checkpoint)
    assert [row.what for row in rows] == [f"logits of the exported {name}" for name in planned] and not lines
    assert len(rows) == ways and all(row.holds and row.count == EVALUATED for row in rows), rows
