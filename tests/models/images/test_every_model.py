"""Shows that every model of images and text of transformers is seen or refused, as docs/images.md says."""

from __future__ import annotations

import pytest
import transformers

from benchmarks.seeing import DOCUMENTS, SeenKind, candidates, read, table, verdict

DOCUMENTED = "5.23"  # the release of transformers whose models the tables have
RELEASED = transformers.__version__.startswith(f"{DOCUMENTED}.")
AT_LEAST = 20  # that are seen; older releases of transformers have fewer


@pytest.mark.longest
def test_every_model_is_seen_or_refused_as_the_documents_say() -> None:
    kinds: list[SeenKind] = [verdict(name) for name in candidates()]
    assert all("\n" not in each.reason for each in kinds)
    assert sum(not each.reason for each in kinds) >= AT_LEAST
    if RELEASED:
        assert [read(document) for document in DOCUMENTS] == [table(kinds)] * len(DOCUMENTS)


@pytest.mark.slow
@pytest.mark.skipif(not RELEASED, reason=f"other releases of transformers than {DOCUMENTED} have other words for it")
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("qwen3_5_moe", "three axes"),
        ("smolvlm", "pixel_attention_mask"),
        ("paligemma", "words see those that follow them"),
        ("ovis2", "gives visual_indicator_features besides"),
        ("deepseek_vl_hybrid", "get_image_features takes high_res_pixel_values"),
        ("kimi_k25", "get_image_features takes no pixel_values"),
        ("cohere2_vision", "texts without images differ"),
        ("blip-2", "has no base model with get_image_features"),
    ],
)
def test_what_a_model_does_or_what_is_missing_is_said(name: str, what: str) -> None:
    found = verdict(name)
    assert what in found.traits + found.reason
