"""Layers that read the same input and that an engine runs as one matrix product: they share their scales.

vLLM's fused layers take the largest global scale of their parts, which is wrong for the others unless all are equal.
"""

from __future__ import annotations

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


def fused_with(module: str) -> tuple[str, ...]:
    """All members of the module's fused layer, itself included, in the order of their rows."""
    parent, _, name = module.rpartition(".")
    for members in FUSED:
        if name in members:
            return tuple(f"{parent}.{member}" for member in members)
    return (module,)
