"""What a run will take before it begins: time and memory of every stage, and how the layers are best divided."""
