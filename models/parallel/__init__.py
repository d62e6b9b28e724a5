"""One layer, or one row of tokens, over several processes."""
