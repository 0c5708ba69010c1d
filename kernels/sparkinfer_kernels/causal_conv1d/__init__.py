"""Depthwise causal convolution with SiLU: varlen with an initial window, and single-token update."""
