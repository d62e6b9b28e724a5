"""How tokens see each other: kernels, documents of a packed row, positions and their angles."""
