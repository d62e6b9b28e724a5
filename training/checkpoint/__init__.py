"""A run on disk: saving, resuming on any topology, exporting."""
