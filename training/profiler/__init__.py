"""Record what every rank did, and when it waited (`profile_steps`)."""
