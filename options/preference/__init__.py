"""Learn which of two answers is better, or which answers are good: DPO and its relatives (docs/preferences.md)."""

from options.preference.keys import KEY, PreferenceKeys
from training.config.changes import MayChange
from training.option import Option

OPTION = Option(PreferenceKeys, before="freeze", rules={KEY: MayChange(False)}, objective_key=KEY)
