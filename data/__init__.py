"""What a sample is: records, prompts, token ids and labels, global batches."""
