"""The key `row_chunk` of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import PositiveInt

from training.config.keys import TrainConfig
from training.config.section import expected
from training.errors import ConfigError

if TYPE_CHECKING:
    from models.spec import ModelSpec

KEY = "row_chunk"


class ChunkKeys(TrainConfig):
    """A run whose rows may pass in chunks."""

    row_chunk: Annotated[PositiveInt | Literal["auto"] | None, expected("a number of tokens, auto, or nothing")] = None
    """Pass rows that are longer than so many tokens through the stages in chunks of about as many, cut so that all
    take equally long (docs/long-rows.md). Losses and gradients stay those of whole rows; a stage keeps the activations
    of some chunks, and the keys and values of some rows. `auto`: the planner's choice."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.row_chunk is None:
            return
        if self.row_chunk == "auto" and not self.is_planned:
            yield f"{KEY}: auto: options.planner, which chooses, is not among the options; expected a number of tokens"
        if self.row_chunk == "auto" and self.weights_on_host:
            yield f"{KEY}: auto: not with schedule: {self.schedule}; expected a number of tokens"
        for unlike, other in (
            (self.schedule == "dualpipev", f"schedule: {self.schedule}"),
            (self.model_topo.sequence > 1, "model_topo.sequence, which divides rows among processes"),
            (self.offload_activations, "offload_activations"),
            (self.fp8.enabled, "fp8.enabled, whose products need multiples of 16 tokens"),
        ):
            if unlike:
                yield f"{KEY}: not with {other}; expected one of them"
        if not self.objective.by_token:
            key = " and ".join(self.objective_keys)
            yield f"{KEY}: not with {key}, whose loss needs whole rows; expected one of them"

    def check_model(self, spec: ModelSpec) -> None:
        super().check_model(spec)
        if self.row_chunk and not spec.family.chunks_rows:
            reason = f"in {spec.family.name} tokens meet in a way that no chunk can hand on"
            if spec.family.sees:
                reason = "the records have images, which lie in whole rows"
            raise ConfigError(f"{KEY}: {reason}; expected no {KEY}")

    def check_entry_point(self, in_stages: bool) -> None:
        super().check_entry_point(in_stages)
        if self.row_chunk and self.zero_optimization.stage > 1:
            raise ConfigError(
                f"{KEY}: not with zero_optimization.stage: {self.zero_optimization.stage}, whose processes sum in each "
                "backward pass, and have other numbers of chunks; expected 0 or 1"
            )
