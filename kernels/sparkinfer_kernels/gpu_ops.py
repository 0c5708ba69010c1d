"""The operations that the GPU model is built on, as one table: Triton kernels here, plain torch twins in tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Op = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class GpuOps:
    """Each has the contract of the function of that name in `<op>/gpu.py`."""

    # linear
    skinny_rows: int
    prepare_bf16: Op
    prepare_nvfp4: Op
    prepare_fp8_block: Op
    prepare_fp8_rows: Op
    make_linear_workspace: Op
    linear: Op
    linear_swiglu: Op
    # rms_norm
    embed_rms_norm: Op
    add_rms_norm: Op
    swiglu: Op
    quantise_rows: Op
    # rotary
    qk_norm_rotary_write: Op
    gate_view: Op
    # attention
    make_attention_workspace: Op
    plan_attention: Op
    attention_decode: Op
    attention_prefill: Op
    # gated_delta_rule
    make_gdn_decode_workspace: Op
    make_gdn_prefill_workspace: Op
    gdn_heads: Op
    gdn_checkpoints: Op
    plan_gdn_prefill: Op
    gdn_decode: Op
    gdn_prefill: Op
    # moe
    prepare_moe: Op
    make_moe_workspace: Op
    moe: Op
    # sampler
    make_sampler_workspace: Op
    sampling_tensors: Op
    sample: Op
    logprobs: Op
    # step
    prepare_step: Op
    keep_tokens: Op


def _moe() -> dict[str, Op]:
    from sparkinfer_kernels.moe import gpu

    return {"prepare_moe": gpu.prepare_moe, "make_moe_workspace": gpu.make_workspace, "moe": gpu.moe}


def triton_ops() -> GpuOps:
    """The kernels for Hopper and Blackwell."""
    from sparkinfer_kernels.attention import gpu as attention
    from sparkinfer_kernels.gated_delta_rule import gpu as gdn
    from sparkinfer_kernels.linear import gpu as linear
    from sparkinfer_kernels.rms_norm import gpu as norm
    from sparkinfer_kernels.rotary import gpu as rotary
    from sparkinfer_kernels.sampler import gpu as sampler
    from sparkinfer_kernels.step import gpu as step

    return GpuOps(
        skinny_rows=linear.SKINNY_ROWS,
        prepare_bf16=linear.prepare_bf16,
        prepare_nvfp4=linear.prepare_nvfp4,
        prepare_fp8_block=linear.prepare_fp8_block,
        prepare_fp8_rows=linear.prepare_fp8_rows,
        make_linear_workspace=linear.make_workspace,
        linear=linear.linear,
        linear_swiglu=linear.linear_swiglu,
        embed_rms_norm=norm.embed_rms_norm,
        add_rms_norm=norm.add_rms_norm,
        swiglu=norm.swiglu,
        quantise_rows=norm.quantise_rows,
        qk_norm_rotary_write=rotary.qk_norm_rotary_write,
        gate_view=rotary.gate_view,
        make_attention_workspace=attention.make_workspace,
        plan_attention=attention.plan,
        attention_decode=attention.attention_decode,
        attention_prefill=attention.attention_prefill,
        make_gdn_decode_workspace=gdn.make_decode_workspace,
        make_gdn_prefill_workspace=gdn.make_prefill_workspace,
        gdn_heads=gdn.Heads,
        gdn_checkpoints=gdn.Checkpoints,
        plan_gdn_prefill=gdn.plan_prefill,
        gdn_decode=gdn.gdn_decode,
        gdn_prefill=gdn.gdn_prefill,
        **_moe(),
        make_sampler_workspace=sampler.make_workspace,
        sampling_tensors=sampler.SamplingTensors,
        sample=sampler.sample,
        logprobs=sampler.logprobs,
        prepare_step=step.prepare_step,
        keep_tokens=step.keep_tokens,
    )
