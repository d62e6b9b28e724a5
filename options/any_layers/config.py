"""The config of a `Pipeline`: the keys of any run, without those of language models, plus keys of your own.

It is a `TrainConfig`, so everything that uses one (DeepSpeed's keys, the optimizer, checkpoints, checks on resuming)
works with this one. A subclass adds keys:

    class MyConfig(PipelineConfig):
        width: int = 64

They are checked like all others, written to the run's config.yml, and must stay the same when a run is resumed.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from options import RunConfig
from training.config.section import DataPath

LANGUAGE_MODEL_KEYS = frozenset(
    "model_path data_path from_scratch stream_gb max_seq_len truncate packing pack_len dataloader_drop_last "
    "prompt_format template_args template_fallback mask on_bad_record cache_dir aux_max_z_loss aux_router_loss "
    "export_hf eval_data_path eval_share schedule offload_activations use_flash_attn compile fp8 rebalance "
    "distillation lora preference labels freeze".split()
)


class PipelineConfig(RunConfig):
    """A run of a `Pipeline`."""

    model_path: str = ""
    data_path: DataPath = []

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, raw: Any) -> Any:
        for key in LANGUAGE_MODEL_KEYS.intersection(raw):
            raise ValueError(f"{key}: a key of language models, without effect on a Pipeline's layers; leave it out")
        if raw.get("train_micro_batch_size_per_gpu") == "auto":
            raise ValueError("train_micro_batch_size_per_gpu: auto knows language models; expected a number of rows")
        if raw.get("use_grad_ckpt") == "auto":
            raise ValueError("use_grad_ckpt: auto knows the blocks of language models; expected true or {every: n}")
        return raw

    @model_validator(mode="after")
    def _check_sharing(self) -> PipelineConfig:
        if "model" in self.model_topo.process_topology.axes:
            raise ValueError("model_topo.process_topology.axes: a Pipeline shards no layers; expected no model axis")
        if self.model_topo.sequence > 1:
            raise ValueError("model_topo.sequence: only language models have sequences to share; expected 1")
        if (stage := self.zero_optimization.stage) > 1:
            raise ValueError(
                f"zero_optimization.stage: {stage}: each stage of a Pipeline holds its layers whole; expected 0 or 1, "
                "and more stages where memory is short"
            )
        return self

    def dump(self) -> dict[str, Any]:
        """Return the resolved config as plain values, ready for YAML."""
        return self.model_dump(mode="json", exclude_none=True, exclude=set(LANGUAGE_MODEL_KEYS))
