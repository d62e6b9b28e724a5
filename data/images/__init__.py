"""See images in records: where they stand, what they are, and the pixels that a step gets of them."""
