"""The Gated DeltaNet kernels compiled for sm_90 and sm_120: shared memory within the limit, spills within budget."""

from __future__ import annotations

import pytest
from aot import SHARED_LIMIT, KernelBuild, compile_kernels
from sparkinfer_kernels.causal_conv1d.gpu import heads_together
from sparkinfer_kernels.gated_delta_rule.layout import Heads
from sparkinfer_kernels.gated_delta_rule.tuned import Launch, tunings

RULE = "sparkinfer_kernels.gated_delta_rule"
HEADS = {"dense": Heads(16, 48), "moe": Heads(16, 32)}
DIVISIBLE = ("row_stride", "window_stride", "state_stride", "out_stride", "checkpoint_stride")
FP32 = ("conv_weight", "weight", "neg_exp_a_log", "dt_bias", "norm_weight", "decay", "state", "checkpoint_state")
INTS = (
    "slots", "tickets", "cu_seqlens", "starts", "chunk_sequence", "chunk_token", "chunk_length", "chunk_checkpoint",
    "checkpoint_sequence", "checkpoint_position", "first_chunk", "active",
)  # fmt: skip
SCALARS = (*DIVISIBLE, "dummy_slot", "checkpoints", "one_wave")

KERNELS = {
    "decode": (
        f"{RULE}.decode_kernels:gdn_decode_kernel",
        "proj window state slots tickets conv_weight neg_exp_a_log dt_bias norm_weight out row_stride window_stride "
        "state_stride out_stride dummy_slot eps",
    ),
    "conv": (
        "sparkinfer_kernels.causal_conv1d.kernels:conv_prefill_kernel",
        "proj window slots cu_seqlens starts weight mixed chunk_sequence chunk_token chunk_length chunk_checkpoint "
        "checkpoint_sequence checkpoint_position checkpoint_window row_stride window_stride checkpoint_stride "
        "checkpoints",
    ),
    "transform": (
        f"{RULE}.prefill_kernels:transform_kernel",
        "proj window slots cu_seqlens starts neg_exp_a_log dt_bias mixed decay w u before chunk_sequence chunk_token "
        "chunk_length row_stride window_stride",
    ),
    "scan": (
        f"{RULE}.prefill_kernels:scan_kernel",
        "state slots cu_seqlens starts mixed decay w u before active first_chunk chunk_checkpoint checkpoint_state "
        "state_stride checkpoint_stride one_wave",
    ),
    "checkpoint": (
        f"{RULE}.prefill_kernels:checkpoint_kernel",
        "starts mixed decay u first_chunk chunk_length chunk_checkpoint checkpoint_sequence checkpoint_position "
        "checkpoint_state checkpoint_stride checkpoints",
    ),
    "output": (
        f"{RULE}.prefill_kernels:output_kernel",
        "proj norm_weight out mixed decay v_new before active chunk_sequence chunk_token chunk_length row_stride "
        "out_stride eps",
    ),
}


def kind(argument: str) -> str:
    if argument in SCALARS:
        return "i32"
    if argument == "eps":
        return "fp32"
    return "*i32" if argument in INTS else "*fp32" if argument in FP32 else "*bf16"


def constexprs(kernel: str, heads: Heads, launch: Launch) -> dict:
    values = {"HK": heads.key, "HV": heads.value, "D": 128}
    if kernel != "decode":
        values["CHUNK"] = 64
    if kernel in ("conv", "scan"):
        values["CHECKPOINTS"] = True
    if kernel == "conv":
        values |= {"BLOCK": launch.block, "HEADS": heads_together(heads)}
    if kernel in ("decode", "scan", "checkpoint"):
        values["COLUMNS"] = launch.block
    if kernel == "scan":
        values["NARROW"] = launch.narrow or launch.block
    return values


def build(name: str, heads: Heads, entry: str, sass: bool = False) -> KernelBuild:
    """The kernel as an entry of `tuned.json` launches it; `decode_many` is the decode kernel of many rows."""
    launch: Launch = getattr(tunings()[entry], name)
    arch = int(entry.split()[0].removeprefix("sm_"))
    kernel = name.removesuffix("_many")
    module, arguments = KERNELS[kernel]
    names = arguments.split()
    return KernelBuild(
        module,
        {argument: kind(argument) for argument in names},
        constexprs(kernel, heads, launch),
        arch=arch,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        maxnreg=launch.maxnreg,
        divisible=tuple(name for name in names if name in DIVISIBLE),
        sass=sass,
    )


SPILL_BUDGET = {"sm_90": 80, "sm_120": 16}
"""Bytes a thread. The output kernel of sm_90 spills 72 and is the fastest nevertheless; sm_120 has no matrix
instruction that leaves its operands in shared memory."""


@pytest.mark.parametrize("entry", sorted(tunings()))
def test_kernels_compile_within_limits(entry):
    arch = int(entry.split()[0].removeprefix("sm_"))
    names = [*KERNELS, "decode_many"]
    for used in compile_kernels([build(name, HEADS["dense"], entry, sass=True) for name in names]):
        used.check(shared=SHARED_LIMIT[arch], spills=SPILL_BUDGET[entry])
        if arch == 90 and used.build.kernel.split(":")[1] in ("transform_kernel", "scan_kernel", "output_kernel"):
            assert used.count("HGMMA") > 0, f"{used.build.kernel} does without Hopper's matrix instructions"


def test_decode_reads_the_state_in_wide_loads_once():
    """64 KiB of state over the threads of a block in 16-byte loads and stores; nothing in local memory."""
    for name in ("decode", "decode_many"):
        plan = build(name, HEADS["moe"], "sm_90", sass=True)
        (used,) = compile_kernels([plan])
        tile = 128 * 128 * 4 // (16 * 32 * plan.num_warps)
        assert tile <= used.count("LDG.E.128") <= tile + 16
        assert tile <= used.count("STG.E.128") <= tile + 4
        assert used.count("LDL") == used.count("STL") == 0
