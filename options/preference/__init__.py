"""Learn which of two answers is better, or which answers are good: DPO and its relatives (docs/preferences.md)."""
