"""`make quickstart`: the whole main job on a real small model, before and after."""
