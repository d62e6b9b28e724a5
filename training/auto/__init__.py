"""A config that nobody has to write: the machine, the model and the data are looked at, and each value has a reason."""
