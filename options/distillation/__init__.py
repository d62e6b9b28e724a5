"""Learn from the probabilities of a larger model too (docs/distillation.md)."""

from options.distillation.keys import KEY, DistillationKeys
from training.config.changes import NEXT, MayChange
from training.option import Option

OPTION = Option(DistillationKeys, before="freeze", rules={KEY: MayChange(True, NEXT)}, objective_key=KEY)
