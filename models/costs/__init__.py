"""What a layer does and keeps, counted on tensors without numbers: for plans, and for a run's share of the peak."""
