"""What a run is: config, processes, engine, optimizer, loop, metrics, checkpoints."""
