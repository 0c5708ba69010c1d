"""Per-head q/k norm with partial rotary position embedding."""
