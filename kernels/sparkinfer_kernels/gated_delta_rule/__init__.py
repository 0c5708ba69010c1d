"""Gated delta rule (linear attention): chunked varlen prefill and recurrent decode."""
