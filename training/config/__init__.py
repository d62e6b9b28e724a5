"""The config of a run: its keys, their YAML file, what DeepSpeed gets of them."""
