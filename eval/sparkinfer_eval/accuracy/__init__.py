"""Two engines on the same held-out text: top-1 agreement, KL divergence, perplexity, greedy answers."""
