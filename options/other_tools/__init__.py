"""Write a config of ours from another tool's (docs/coming-from.md)."""
