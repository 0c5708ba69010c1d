"""Root-mean-square norms: zero-centred with optional residual add, and gated."""
