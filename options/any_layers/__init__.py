"""Train any sequence of layers in a pipeline: an image classifier, an encoder and a decoder, ... (docs/api.md)."""

from options.any_layers.config import PipelineConfig
from options.any_layers.pipeline import Pipeline, load_trained

__all__ = ["Pipeline", "PipelineConfig", "load_trained"]
