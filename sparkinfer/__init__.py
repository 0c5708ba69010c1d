"""sparkinfer: inference for the Qwen3.5/3.6/3.8 hybrid family in torch and Triton."""

__version__ = "0.1.0"
