"""Grouped-query attention over a paged KV cache: varlen prefill and batched decode."""
