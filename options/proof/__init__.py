"""`train_ds.py --config F --prove`: a user's own run, made small, against one process on the user's own machine."""
