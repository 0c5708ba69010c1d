"""Token sampling with counter-based noise, and log-probabilities."""
