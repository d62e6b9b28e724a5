"""Make a config from a machine, a model and records: `--auto`."""
