"""Train a model that gives a text numbers: a reward, or a class (docs/preferences.md#reward-models-and-classes)."""
