"""Layers behind the final norm that predict further ahead: multi-token prediction, which servers use to draft."""
