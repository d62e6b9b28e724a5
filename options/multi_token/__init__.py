"""Train the layers along that predict further ahead, which servers draft with (docs/multi-token-prediction.md)."""

from options.multi_token.keys import KEY, DraftKeys
from training.config.changes import NEXT, MayChange
from training.option import Option

OPTION = Option(DraftKeys, before="freeze", rules={KEY: MayChange(False, NEXT)}, objective_key=KEY)
