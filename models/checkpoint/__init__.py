"""Model folders: reading both layouts, writing both, converting between them."""
