"""Chunked gated delta rule in Triton (Yang et al. 2024, arXiv 2406.06484 and 2412.06464): bf16 operands, fp32 sums.

With G the running sum of g inside a chunk, S the state before it, and T = (I + A)^-1 diag(beta) where
A_ij = beta_i exp(G_i - G_j) k_i . k_j for j < i:

    u = T v;  w = T diag(exp(G)) k                                  `transform_kernel`, every chunk on its own
    v_new = u - w S;  S' = exp(G_last) S + (exp(G_last - G) k)^T v_new     `scan_kernel`, chunk after chunk
    o = exp(G) q S + tril(exp(G_i - G_j) q_i . k_j) v_new              `output_kernel`, every chunk on its own

Rows of a chunk past its length have k = v = 0, beta = 0 and g = 0, so G stays at its last value there.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from sparkinfer_kernels.causal_conv1d.kernels import save_window, silu
from sparkinfer_kernels.gated_delta_rule.decode_kernels import softplus
from sparkinfer_kernels.gated_delta_rule.layout import CHUNK, HEAD_DIM, Checkpoints, Heads, PrefillWorkspace
from sparkinfer_kernels.gated_delta_rule.tuned import Launch


@triton.jit
def unit_lower_inverse(a, scratch, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """(I + a)^-1 for strictly lower triangular a [SIZE, SIZE], fp32, SIZE = 4 * BLOCK.

    Diagonal blocks by substitution, which does not cancel where keys repeat: row r of an inverse X follows from its
    last column on, X_rc = I_rc - sum over j > c of X_rj a_jc, all rows at once. With D their inverses and N the part of
    a below them, (I + a)^-1 = (I + DN)^-1 D, and DN is nilpotent in four steps: (I - DN)(I + (DN)^2) D. No element of
    these exceeds 64 (each step of the rule contracts), so fp16 holds them with the precision of tf32.

    scratch: SIZE * BLOCK fp32 that no other program uses.
    """
    BLOCKS: tl.constexpr = SIZE // BLOCK
    i = tl.arange(0, SIZE)
    j = tl.arange(0, BLOCK)
    same = (i // BLOCK)[:, None] == (i // BLOCK)[None, :]
    tl.store(scratch + i[None, :] * BLOCK + (i % BLOCK)[:, None], a, mask=same)
    tl.debug_barrier()
    x = tl.where((i % BLOCK)[:, None] == j[None, :], 1.0, tl.zeros([SIZE, BLOCK], tl.float32))
    for step in tl.static_range(1, BLOCK):
        c = BLOCK - 1 - step
        column = tl.load(scratch + (i // BLOCK * BLOCK + c)[:, None] * BLOCK + j[None, :])
        x -= tl.where(j[None, :] == c, tl.sum(x * column, 1)[:, None], 0.0)
    at = tl.arange(0, BLOCKS)[None, :, None] == (i // BLOCK)[:, None, None]
    d = tl.reshape(tl.where(at, x[:, None, :], 0.0), [SIZE, SIZE])
    d16 = d.to(tl.float16)
    m16 = tl.dot(d16, tl.where(same, 0.0, a).to(tl.float16)).to(tl.float16)
    right = tl.dot(tl.dot(m16, m16).to(tl.float16), d16, d)
    return right - tl.dot(m16, right.to(tl.float16))


@triton.jit
def transform_kernel(
    proj, window, slots, cu_seqlens, starts, neg_exp_a_log, dt_bias, mixed, decay, w, u, before,
    chunk_sequence, chunk_token, chunk_length, row_stride, window_stride,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Gates, UT transform of one chunk of one value head; the last chunk of a sequence moves its window on."""
    CHANNELS: tl.constexpr = (2 * HK + HV) * D
    GROUP: tl.constexpr = HV // HK
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    sequence = tl.load(chunk_sequence + chunk)
    if sequence < 0:
        return
    length = tl.load(chunk_length + chunk)
    token = tl.load(chunk_token + chunk)
    i = tl.arange(0, CHUNK)
    lane = tl.arange(0, D)
    real = i < length
    rows = (token + i).to(tl.int64)
    base = chunk.to(tl.int64) * HV + head
    gates = proj + rows * row_stride + CHANNELS + HV * D + head
    b = tl.load(gates, mask=real, other=0.0).to(tl.float32)
    a = tl.load(gates + HV, mask=real, other=0.0).to(tl.float32)
    heads = mixed + chunk.to(tl.int64) * (CHANNELS * CHUNK) + i[:, None] * D + lane[None, :]
    k = tl.load(heads + (HK + head // GROUP) * (CHUNK * D))
    v = tl.load(heads + (2 * HK + head) * (CHUNK * D))
    beta = tl.where(real, tl.sigmoid(b), 0.0)
    g = tl.where(real, tl.load(neg_exp_a_log + head) * softplus(a + tl.load(dt_bias + head)), 0.0)
    total = tl.cumsum(g, 0)
    tl.store(decay + base * CHUNK + i, total)
    products = tl.dot(k, tl.trans(k))
    below = i[:, None] > i[None, :]
    ratio = tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0))
    system = tl.where(below, products * ratio * beta[:, None], 0.0)
    # The states before the chunks are written after this kernel: their place holds the scratch.
    scratch = (before + base * (D * D)).to(tl.pointer_type(tl.float32))
    inverse = unit_lower_inverse(system, scratch, CHUNK, CHUNK // 4) * beta[None, :]
    to = base * (CHUNK * D) + i[:, None] * D + lane[None, :]
    tl.store(u + to, tl.dot(inverse.to(v.dtype), v).to(u.dtype.element_ty))
    inverse *= tl.exp(total)[None, :]
    tl.store(w + to, tl.dot(inverse.to(k.dtype), k).to(w.dtype.element_ty))

    first_row = tl.load(cu_seqlens + sequence)
    if token + length == tl.load(cu_seqlens + sequence + 1):
        past = window + tl.load(slots + sequence).to(tl.int64) * window_stride
        fresh = tl.load(starts + sequence) == 0
        done = token + length - first_row
        save_window(proj, past, past, first_row, done, row_stride, (2 * HK + head) * D + lane, fresh, CHANNELS)
        if head % GROUP == 0:
            channel = (head // GROUP) * D + lane
            save_window(proj, past, past, first_row, done, row_stride, channel, fresh, CHANNELS)
            save_window(proj, past, past, first_row, done, row_stride, channel + HK * D, fresh, CHANNELS)


@triton.jit
def scan_columns(
    part, length, state, slots, starts, mixed, decay, w, u, before, first_chunk, chunk_checkpoint,
    checkpoint_state, state_stride, checkpoint_stride,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """Part `part` of a sequence's states, COLUMNS columns of V of one value head, through all chunks."""
    CHANNELS: tl.constexpr = (2 * HK + HV) * D
    GROUP: tl.constexpr = HV // HK
    SPLIT: tl.constexpr = D // COLUMNS
    head = part // SPLIT
    sequence = tl.program_id(1)
    start = tl.load(starts + sequence)
    first = tl.load(first_chunk + sequence)
    chunks = (start + length - 1) // CHUNK - start // CHUNK + 1
    i = tl.arange(0, CHUNK)
    lane = tl.arange(0, D)
    column = (part % SPLIT) * COLUMNS + tl.arange(0, COLUMNS)
    square = lane[:, None] * D + column[None, :]
    own = state + tl.load(slots + sequence).to(tl.int64) * state_stride + head * D * D + square
    s = tl.load(own, mask=(start > 0) & (lane[:, None] >= 0) & (column[None, :] >= 0), other=0.0).to(tl.float32)
    keys = mixed + (HK + head // GROUP) * (CHUNK * D) + i[:, None] * D + lane[None, :]
    for n in range(0, chunks):
        base = (first + n).to(tl.int64) * HV + head
        k = tl.load(keys + (first + n).to(tl.int64) * (CHANNELS * CHUNK))
        w_tile = tl.load(w + base * (CHUNK * D) + i[:, None] * D + lane[None, :])
        at = u + base * (CHUNK * D) + i[:, None] * D + column[None, :]
        u_tile = tl.load(at)
        total = tl.load(decay + base * CHUNK + i)
        last = tl.load(decay + base * CHUNK + CHUNK - 1)
        if CHECKPOINTS:
            wanted = tl.load(chunk_checkpoint + first + n)
            if wanted >= 0:
                saved = checkpoint_state + wanted.to(tl.int64) * checkpoint_stride + head * D * D + square
                tl.store(saved, s)
        s_low = s.to(before.dtype.element_ty)
        tl.store(before + base * (D * D) + square, s_low)
        v_new = (u_tile.to(tl.float32) - tl.dot(w_tile, s_low)).to(u.dtype.element_ty)
        tl.store(at, v_new)
        decayed = (v_new.to(tl.float32) * tl.exp(last - total)[:, None]).to(u.dtype.element_ty)
        s = tl.dot(tl.trans(k), decayed, s * tl.exp(last))
    tl.store(own, s.to(state.dtype.element_ty))


@triton.jit
def scan_kernel(
    state, slots, cu_seqlens, starts, mixed, decay, w, u, before, active, first_chunk, chunk_checkpoint,
    checkpoint_state, state_stride, checkpoint_stride, one_wave,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    NARROW: tl.constexpr, CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """Grid (HV * D / NARROW, sequences): some columns of V of one value head's state through all chunks of a sequence.

    COLUMNS of them, or NARROW where programs with so few all run at a time (`one_wave` of them).
    """
    part = tl.program_id(0)
    length = tl.load(cu_seqlens + tl.program_id(1) + 1) - tl.load(cu_seqlens + tl.program_id(1))
    if length > 0:
        if (NARROW < COLUMNS) & (tl.load(active + 1) * (HV * (D // NARROW)) <= one_wave):
            scan_columns(
                part, length, state, slots, starts, mixed, decay, w, u, before, first_chunk, chunk_checkpoint,
                checkpoint_state, state_stride, checkpoint_stride, HK, HV, D, CHUNK, NARROW, CHECKPOINTS,
            )  # fmt: skip
        elif part < HV * (D // COLUMNS):
            scan_columns(
                part, length, state, slots, starts, mixed, decay, w, u, before, first_chunk, chunk_checkpoint,
                checkpoint_state, state_stride, checkpoint_stride, HK, HV, D, CHUNK, COLUMNS, CHECKPOINTS,
            )  # fmt: skip


@triton.jit
def checkpoint_kernel(
    starts, mixed, decay, u, first_chunk, chunk_length, chunk_checkpoint,
    checkpoint_sequence, checkpoint_position, checkpoint_state, checkpoint_stride, checkpoints,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """From the state before a chunk, left by the scan in the chunk's first checkpoint, the states of all of its
    checkpoints: those after some of its tokens."""
    CHANNELS: tl.constexpr = (2 * HK + HV) * D
    GROUP: tl.constexpr = HV // HK
    SPLIT: tl.constexpr = D // COLUMNS
    head = tl.program_id(0) // SPLIT
    n = tl.program_id(1)
    sequence = tl.load(checkpoint_sequence + n)
    if sequence < 0:
        return
    start = tl.load(starts + sequence)
    position = tl.load(checkpoint_position + n)
    index = (position - 1) // CHUNK - start // CHUNK
    chunk = tl.load(first_chunk + sequence) + index
    if tl.load(chunk_checkpoint + chunk) != n:
        return
    begin = tl.maximum(start, (position - 1) // CHUNK * CHUNK)
    length = tl.load(chunk_length + chunk)
    i = tl.arange(0, CHUNK)
    lane = tl.arange(0, D)
    column = (tl.program_id(0) % SPLIT) * COLUMNS + tl.arange(0, COLUMNS)
    square = head * D * D + lane[:, None] * D + column[None, :]
    base = chunk.to(tl.int64) * HV + head
    keys = mixed + chunk.to(tl.int64) * (CHANNELS * CHUNK) + (HK + head // GROUP) * (CHUNK * D)
    k = tl.load(keys + i[:, None] * D + lane[None, :])
    v_new = tl.load(u + base * (CHUNK * D) + i[:, None] * D + column[None, :])
    total = tl.load(decay + base * CHUNK + i)
    saved = checkpoint_state + n.to(tl.int64) * checkpoint_stride + square
    s = tl.load(saved).to(tl.float32)
    # Entries of this chunk follow one another; the first may be read again only after all threads have `s`.
    tl.debug_barrier()
    more = True
    while more:
        tokens = position - begin
        last = tl.load(decay + base * CHUNK + tokens - 1)
        fade = tl.where(i < tokens, tl.exp(tl.where(i < tokens, last - total, 0.0)), 0.0)
        decayed = (v_new.to(tl.float32) * fade[:, None]).to(u.dtype.element_ty)
        after = tl.dot(tl.trans(k), decayed, s * tl.exp(last))
        tl.store(saved, after.to(checkpoint_state.dtype.element_ty))
        n += 1
        saved += checkpoint_stride
        more = n < checkpoints
        if more:
            more = tl.load(checkpoint_sequence + n) == sequence
        if more:
            position = tl.load(checkpoint_position + n)
            more = position <= begin + length


@triton.jit
def output_kernel(
    proj, norm_weight, out, mixed, decay, v_new, before, active, chunk_sequence, chunk_token, chunk_length,
    row_stride, out_stride, eps,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Outputs of chunks of single value heads, normed and gated, one after another; zeros in padding rows."""
    CHANNELS: tl.constexpr = (2 * HK + HV) * D
    GROUP: tl.constexpr = HV // HK
    i = tl.arange(0, CHUNK)
    lane = tl.arange(0, D)
    tile = i[:, None] * D + lane[None, :]
    weight = tl.load(norm_weight + lane)
    seen = i[:, None] >= i[None, :]
    for unit in range(tl.program_id(0), tl.load(active) * HV, tl.num_programs(0)):
        chunk = unit // HV
        head = unit % HV
        # A block of padding rows goes the same way with zeros for everything.
        used = tl.load(chunk_sequence + chunk) >= 0
        base = chunk.to(tl.int64) * HV + head
        heads = mixed + chunk.to(tl.int64) * (CHANNELS * CHUNK) + tile
        mask = used & (tile >= 0)
        q = tl.load(heads + (head // GROUP) * (CHUNK * D), mask=mask, other=0.0)
        k = tl.load(heads + (HK + head // GROUP) * (CHUNK * D), mask=mask, other=0.0)
        square = lane[:, None] * D + lane[None, :]
        s = tl.load(before + base * (D * D) + square, mask=used & (square >= 0), other=0.0)
        v = tl.load(v_new + base * (CHUNK * D) + tile, mask=mask, other=0.0)
        total = tl.load(decay + base * CHUNK + i, mask=used & (i >= 0), other=0.0)
        length = tl.load(chunk_length + chunk)
        rows = (tl.load(chunk_token + chunk) + i).to(tl.int64)
        real = (i < length)[:, None]
        z = tl.load(proj + rows[:, None] * row_stride + (CHANNELS + head * D + lane)[None, :], mask=real, other=0.0)
        o = tl.dot(q, s) * tl.exp(total)[:, None]
        ratio = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
        inner = tl.where(seen, tl.dot(q, tl.trans(k)) * ratio, 0.0)
        o = tl.dot(inner.to(v.dtype), v, o)
        o *= tl.rsqrt(tl.sum(o * o, 1) / D + eps)[:, None] * weight[None, :]
        to = out + rows[:, None] * out_stride + (head * D + lane)[None, :]
        tl.store(to, (o * silu(z.to(tl.float32))).to(out.dtype.element_ty), mask=real)


def transform_chunks(
    proj: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    neg_exp_a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    workspace: PrefillWorkspace,
    heads: Heads,
    launch: Launch,
) -> None:
    """Write `workspace.decay`, `w` and `u`, and each slot's new window."""
    transform_kernel[(heads.value, workspace.chunks(proj.shape[0], slots.shape[0]))](
        proj, window, slots, cu_seqlens, starts, neg_exp_a_log, dt_bias,
        workspace.mixed, workspace.decay, workspace.w, workspace.u, workspace.before,
        workspace.chunk_sequence, workspace.chunk_token, workspace.chunk_length, proj.stride(0), window.stride(0),
        HK=heads.key, HV=heads.value, D=HEAD_DIM, CHUNK=CHUNK,
        **launch.options,
    )  # fmt: skip


def scan_states(
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    workspace: PrefillWorkspace,
    heads: Heads,
    checkpoints: Checkpoints | None,
    launch: Launch,
) -> None:
    """Write `workspace.before` and `u` (v_new), each slot's new state, and for `finish_checkpoints` where it starts."""
    narrow = min(launch.narrow or launch.block, launch.block)
    scan_kernel[(heads.value * (HEAD_DIM // narrow), slots.shape[0])](
        state, slots, cu_seqlens, starts, workspace.mixed, workspace.decay, workspace.w, workspace.u, workspace.before,
        workspace.active, workspace.first_chunk, workspace.chunk_checkpoint,
        state if checkpoints is None else checkpoints.state,
        state.stride(0), 0 if checkpoints is None else checkpoints.state.stride(0), multiprocessors(state.device),
        HK=heads.key, HV=heads.value, D=HEAD_DIM, CHUNK=CHUNK, COLUMNS=launch.block, NARROW=narrow,
        CHECKPOINTS=checkpoints is not None, **launch.options,
    )  # fmt: skip


def finish_checkpoints(
    starts: torch.Tensor, workspace: PrefillWorkspace, heads: Heads, checkpoints: Checkpoints, launch: Launch
) -> None:
    """Bring the states at chunk begins, left by `scan_states`, to the checkpoints' positions."""
    wanted = checkpoints.sequence.shape[0]
    checkpoint_kernel[(heads.value * (HEAD_DIM // launch.block), wanted)](
        starts, workspace.mixed, workspace.decay, workspace.u, workspace.first_chunk,
        workspace.chunk_length, workspace.chunk_checkpoint,
        checkpoints.sequence, checkpoints.position, checkpoints.state, checkpoints.state.stride(0), wanted,
        HK=heads.key, HV=heads.value, D=HEAD_DIM, CHUNK=CHUNK, COLUMNS=launch.block,
        **launch.options,
    )  # fmt: skip


def write_outputs(
    proj: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    workspace: PrefillWorkspace,
    heads: Heads,
    sequences: int,
    launch: Launch,
) -> None:
    """Write `out` from the states before the chunks and v_new."""
    units = heads.value * workspace.chunks(proj.shape[0], sequences)
    output_kernel[(min(units, launch.programs * multiprocessors(proj.device)),)](
        proj, norm_weight, out, workspace.mixed, workspace.decay, workspace.u, workspace.before, workspace.active,
        workspace.chunk_sequence, workspace.chunk_token, workspace.chunk_length,
        proj.stride(0), out.stride(0), eps,
        HK=heads.key, HV=heads.value, D=HEAD_DIM, CHUNK=CHUNK,
        **launch.options,
    )  # fmt: skip


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; some number for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
