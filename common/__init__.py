"""Share what all packages need: files that appear whole, one writer at a time, text that is safe to print."""
