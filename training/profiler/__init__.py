"""`profile_steps`: what every rank did and when it waited."""
