"""What all wings stand on, and no wing: files that appear whole, one writer at a time, text that is safe to print."""
