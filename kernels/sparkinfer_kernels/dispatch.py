"""The one place that decides which implementation of an operation runs on which device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sparkinfer_kernels.attention import reference as attention
from sparkinfer_kernels.causal_conv1d import reference as conv
from sparkinfer_kernels.gated_delta_rule import reference as gdn
from sparkinfer_kernels.linear import reference as projection
from sparkinfer_kernels.moe import reference as moe
from sparkinfer_kernels.rms_norm import reference as norm
from sparkinfer_kernels.rotary import reference as rotary
from sparkinfer_kernels.sampler import reference as sampler

Op = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Ops:
    """A table of operations; each has the contract of the function of that name in `<op>/reference.py`."""

    backend: str
    pack_linear: Op
    linear: Op
    rms_norm: Op
    add_rms_norm: Op
    gated_rms_norm: Op
    qk_norm_rotary: Op
    write_kv: Op
    attention_decode: Op
    attention_prefill: Op
    causal_conv1d_varlen: Op
    causal_conv1d_update: Op
    normalise_qk: Op
    decay_and_beta: Op
    chunk_gated_delta_rule: Op
    recurrent_gated_delta_rule: Op
    swiglu: Op
    moe: Op
    sample: Op
    logprobs: Op


def torch_ops() -> Ops:
    """The plain torch table, right on every device and the hot path on CPU."""
    return Ops(
        backend="torch",
        pack_linear=projection.pack_linear,
        linear=projection.linear,
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        gated_rms_norm=norm.gated_rms_norm,
        qk_norm_rotary=rotary.qk_norm_rotary,
        write_kv=attention.write_kv,
        attention_decode=attention.attention_decode,
        attention_prefill=attention.attention_prefill,
        causal_conv1d_varlen=conv.causal_conv1d_varlen,
        causal_conv1d_update=conv.causal_conv1d_update,
        normalise_qk=gdn.normalise_qk,
        decay_and_beta=gdn.decay_and_beta,
        chunk_gated_delta_rule=gdn.chunk_gated_delta_rule,
        recurrent_gated_delta_rule=gdn.recurrent_gated_delta_rule,
        swiglu=moe.swiglu,
        moe=moe.moe,
        sample=sampler.sample,
        logprobs=sampler.logprobs,
    )


BACKENDS: dict[str, Callable[[], Ops]] = {"torch": torch_ops}
DEFAULT_BACKEND: dict[str, str] = {"cpu": "torch", "cuda": "torch"}


def select_ops(device: torch.device, backend: str | None = None) -> Ops:
    """The table for a device, or of a named backend.

    Raises:
        ValueError: if the device type or the backend is not known.
    """
    name = backend or DEFAULT_BACKEND.get(device.type)
    if name not in BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        raise ValueError(f"no kernels for device {device} with backend {backend!r}; backends: {known}")
    return BACKENDS[name]()
