"""Images in records: where they stand, their tokens in a sample, and their pixels."""
