"""Train a model that gives a text numbers: a reward, or a class (docs/preferences.md#reward-models-and-classes)."""

from options.scores.keys import KEY, ScoresKeys
from training.config.changes import MayChange
from training.option import Option

OPTION = Option(ScoresKeys, before="freeze", rules={KEY: MayChange(False)}, objective_key=KEY)
