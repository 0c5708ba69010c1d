"""Mixture of experts: router, grouped experts, shared expert."""
