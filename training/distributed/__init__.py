"""The processes of a run: how they start, stop and fail together."""
