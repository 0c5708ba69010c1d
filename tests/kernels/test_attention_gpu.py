"""The GPU's paged attention against fp64, on ragged lengths, with padding; interpreted where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreter_fixes import fix_interpreter
from sparkinfer_kernels.attention import gpu as attention
from sparkinfer_kernels.attention import workspace
from sparkinfer_kernels.attention.configs import DECODE, DECODE_MANY, PREFILL, TileConfig
from sparkinfer_kernels.rotary.gpu import gate_view, value_view

fix_interpreter()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
D = 256
LENGTHS = [1, 2, 15, 16, 17, 100, 1]
SPANS = [(0, 17), (15, 1), (16, 60), (0, 0), (33, 16), (100, 2)]
"""(cached, new) tokens."""


def oracle(q, gate, k, v, start):
    group = q.shape[1] // k.shape[1]
    q, gate, k, v = (x.double() for x in (q, gate, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("lhd,chd->hlc", q, k) * D**-0.5
    own = start + torch.arange(q.shape[0], device=q.device)
    scores.masked_fill_(torch.arange(k.shape[0], device=q.device) > own[:, None], -torch.inf)
    return torch.einsum("hlc,chd->lhd", scores.softmax(-1), v) * gate.sigmoid()


class Pool:
    """One layer's cache with shuffled blocks; the last block is the dummy, and unused table entries point nowhere."""

    def __init__(self, lengths, kv_heads, fp8=False):
        needed = [-(-length // 16) for length in lengths]
        blocks = sum(needed) + 1
        self.kv = torch.randn(2, blocks, 16, kv_heads, D, device=DEVICE).bfloat16()
        self.scales = None
        if fp8:
            self.scales = torch.rand(2, kv_heads, device=DEVICE) * 0.02 + 0.01
            self.kv = (self.kv.float() / self.scales.view(2, 1, 1, -1, 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
        self.table = torch.full((len(lengths), max(needed) + 2), 2**24, dtype=torch.int32)
        order = torch.randperm(blocks - 1, dtype=torch.int32)
        for row, parts in enumerate(order.split(needed)):
            self.table[row, : len(parts)] = parts
        self.table = self.table.to(DEVICE)

    def tokens(self, row, count):
        at = torch.arange(count, device=DEVICE)
        place = self.table[row, at // 16].long() * 16 + at % 16
        pair = self.kv.float().flatten(1, 2)[:, place]
        return pair if self.scales is None else pair * self.scales.view(2, 1, -1, 1)


def queries(count, heads, kv_heads):
    proj = torch.randn(count, 2 * (heads + kv_heads) * D, device=DEVICE).bfloat16()
    return torch.randn(count, heads, D, device=DEVICE).bfloat16(), gate_view(proj, heads, kv_heads, D)


def relative(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "config", "fp8"),
    [
        (2, 1, None, False),
        (6, 1, TileConfig(32, 4, 2, programs=1), False),
        (16, 2, DECODE[120], False),
        (2, 1, None, True),
        *(
            pytest.param(heads, kv, config, fp8, marks=pytest.mark.gpu)
            for heads, kv in ((24, 4), (16, 2))
            for config in (DECODE[90], DECODE_MANY[90], DECODE[120])
            for fp8 in (False, True)
        ),
    ],
)
def test_decode(heads, kv_heads, config, fp8):
    pool = Pool(LENGTHS, kv_heads, fp8)
    n = len(LENGTHS)
    q, gate = queries(n, heads, kv_heads)
    pool.table[-1, 0] = pool.kv.shape[1] - 1  # a padding row: one token of the dummy block
    pool.kv[:, -1] = 1.0
    work = attention.make_workspace(n + 2, 0, 0, heads, kv_heads, D, DEVICE, decode_config=config)
    positions = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE) - 1
    attention.plan(work, positions)
    k_cache, v_cache = pool.kv
    outs = []
    for _ in range(2):  # the second launch finds the counters as the first left them
        out = torch.full((n, heads, D), torch.nan, device=DEVICE, dtype=torch.bfloat16)
        attention.attention_decode(q, gate, k_cache, v_cache, pool.table, positions, D**-0.5, work, out, pool.scales)
        outs.append(out)
    assert torch.equal(*outs)
    for row, length in enumerate(LENGTHS):
        expected = oracle(q[row : row + 1], gate[row : row + 1], *pool.tokens(row, length), length - 1)
        assert relative(out[row : row + 1], expected) < 6e-3


def test_plan_covers_every_token_once():
    for lengths in ([1], [1200], [5000, 1, 1, 1], [300] * 20, [1] * 33, [16, 17, 64, 65, 4096] * 3):
        work = attention.make_workspace(len(lengths), 0, 0, 2, 1, D, DEVICE)
        attention.plan(work, torch.tensor(lengths, dtype=torch.int32, device=DEVICE) - 1)
        seen = {row: [] for row in range(len(lengths))}
        for row, begin, end, _ in work.decode_items.tolist():
            if row >= 0:
                assert begin < end
                assert begin % 16 == 0
                seen[row].append((begin, end))
        for row, length in enumerate(lengths):
            pieces = seen[row]
            assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
            assert pieces[-1][1] == length
            assert work.decode_pieces[row, 1].item() == len(pieces) <= 32


def test_independent_rows_are_cut_by_their_own_length():
    cuts = {}
    for lengths in ([700, 1, 8000, 256, 9999], [700, 900, 8000, 256, 1], [700] * 5):
        work = attention.make_workspace(5, 0, 0, 2, 1, D, DEVICE, independent=True)
        attention.plan(work, torch.tensor(lengths, dtype=torch.int32, device=DEVICE) - 1)
        items = [item for item in work.decode_items.tolist() if item[0] >= 0]
        assert sum(end - begin for _, begin, end, _ in items) == sum(lengths)
        for row, length in enumerate(lengths):
            mine = [(begin, end) for owner, begin, end, _ in items if owner == row]
            assert cuts.setdefault(length, mine) == mine
    assert len(cuts[700]) == 3
    assert len(cuts[9999]) <= 32


def test_plan_may_be_reused_for_shorter_steps():
    work = attention.make_workspace(4, 64, 2, 2, 1, D, DEVICE, prefill_config=TileConfig(16, 4, 2, rows=16))
    both = torch.tensor([900, 900, 900, 900], dtype=torch.int32, device=DEVICE), torch.tensor([0, 40, 64])
    attention.plan(work, both[0], both[1].to(DEVICE, torch.int32), torch.zeros(2, dtype=torch.int32, device=DEVICE))
    first = (work.decode_items[:, 0] >= 0).sum().item(), (work.prefill_items[:, 0] >= 0).sum().item()
    short = torch.zeros(4, dtype=torch.int32, device=DEVICE), torch.tensor([0, 3, 3], device=DEVICE)
    attention.plan(work, short[0], short[1].int(), torch.zeros(2, dtype=torch.int32, device=DEVICE))
    second = (work.decode_items[:, 0] >= 0).sum().item(), (work.prefill_items[:, 0] >= 0).sum().item()
    assert first[0] > 4
    assert first[1] == 8
    assert second == (4, 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "config", "fp8"),
    [
        (2, 1, TileConfig(16, 4, 2, rows=16), False),
        (4, 2, TileConfig(64, 4, 2, rows=32), False),
        (2, 1, PREFILL[120], True),
        *(
            pytest.param(heads, kv, config, fp8, marks=pytest.mark.gpu)
            for heads, kv in ((24, 4), (16, 2), (2, 1))
            for config in (PREFILL[90], replace(PREFILL[90], wgmma=False), PREFILL[120])
            for fp8 in (False, True)
        ),
    ],
)
def test_prefill(heads, kv_heads, config, fp8):
    pool = Pool([start + new for start, new in SPANS], kv_heads, fp8)
    total = sum(new for _, new in SPANS)
    q, gate = queries(total + 9, heads, kv_heads)
    ends = torch.tensor([0] + [new for _, new in SPANS]).cumsum(0).to(DEVICE, torch.int32)
    starts = torch.tensor([start for start, _ in SPANS], dtype=torch.int32, device=DEVICE)
    work = attention.make_workspace(0, total + 9, len(SPANS) + 1, heads, kv_heads, D, DEVICE, prefill_config=config)
    attention.plan(work, cu_seqlens=ends, starts=starts)
    out = torch.full((total + 9, heads, D), 7.0, device=DEVICE, dtype=torch.bfloat16)
    k_cache, v_cache = pool.kv
    attention.attention_prefill(q, gate, k_cache, v_cache, pool.table, ends, starts, D**-0.5, work, out, pool.scales)
    assert (out[total:] == 7).all(), "padding was written"
    for row, (start, new) in enumerate(SPANS):
        if new:
            mine = slice(int(ends[row]), int(ends[row + 1]))
            expected = oracle(q[mine], gate[mine], *pool.tokens(row, start + new), start)
            assert relative(out[mine], expected) < 6e-3


LONG = [(700, 3), (0, 0), (0, 5), (1268, 40), (5000, 1)]


@pytest.mark.parametrize(
    ("heads", "config"),
    [
        (2, TileConfig(32, 4, 2, rows=16)),
        (6, TileConfig(32, 4, 2, rows=16)),
        *(
            pytest.param(heads, config, marks=pytest.mark.gpu)
            for heads in (2, 6, 8)
            for config in (PREFILL[90], replace(PREFILL[90], wgmma=False), PREFILL[120])
        ),
    ],
)
def test_contexts_of_few_tiles_are_cut(heads, config, monkeypatch):
    """A few new tokens on long prefixes: every token of a tile's context is in one item, and parts are put together."""
    monkeypatch.setattr(workspace, "MIN_SPAN", 64)
    spans, rows = LONG[: 5 if torch.cuda.is_available() else 4], config.rows
    pool = Pool([start + new for start, new in spans], 1)
    total = sum(new for _, new in spans)
    q, gate = queries(total, heads, 1)
    ends = torch.tensor([0] + [new for _, new in spans]).cumsum(0).to(DEVICE, torch.int32)
    starts = torch.tensor([start for start, _ in spans], dtype=torch.int32, device=DEVICE)
    work = attention.make_workspace(0, 60, len(spans), heads, 1, D, DEVICE, prefill_config=config)
    attention.plan(work, cu_seqlens=ends, starts=starts)
    listed, covered = work.prefill_items.tolist(), {}
    for sequence, tile, first, count in work.prefill_spans.tolist():
        if sequence < 0:
            continue
        parts = listed[first : first + count]
        assert all(part[:2] == [sequence, tile] for part in parts)
        assert [begin for _, _, begin, _ in parts] == [0, *(end for *_, end in parts[:-1])]
        covered[sequence, tile] = parts[-1][3], count
    for sequence, (start, new) in enumerate(spans):
        for tile in range(-(-new * heads // rows)):
            last = min((tile * rows + rows - 1) // heads + 1, new)
            assert covered.pop((sequence, tile))[0] == start + last
    assert not covered
    assert len([item for item in listed if item[0] >= 0]) > 2 * len(work.prefill_spans)
    out = torch.full((total, heads, D), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    k_cache, v_cache = pool.kv
    attention.attention_prefill(q, gate, k_cache, v_cache, pool.table, ends, starts, D**-0.5, work, out)
    for row, (start, new) in enumerate(spans):
        if new:
            mine = slice(int(ends[row]), int(ends[row + 1]))
            expected = oracle(q[mine], gate[mine], *pool.tokens(row, start + new), start)
            assert relative(out[mine], expected) < 6e-3


def test_workspaces_share_partial_results():
    large = attention.make_workspace(8, 64, 2, 6, 1, D, DEVICE)
    small = attention.make_workspace(4, 32, 2, 6, 1, D, DEVICE, share=large)
    assert small.partial.data_ptr() == large.partial.data_ptr()
    larger = attention.make_workspace(2000, 0, 0, 6, 1, D, DEVICE, share=small)
    assert larger.partial.numel() > small.partial.numel()
    assert large.spans
    assert not attention.make_workspace(8, 6000, 2, 6, 1, D, DEVICE).spans
    assert not attention.make_workspace(8, 64, 2, 6, 1, D, DEVICE, independent=True).spans


@pytest.mark.parametrize(("heads", "kv_heads", "count"), [(4, 2, 33), (2, 1, 1)])
def test_fresh_prompt(heads, kv_heads, count):
    proj = torch.randn(count + 15, 2 * (heads + kv_heads) * D, device=DEVICE).bfloat16()
    gate, v = gate_view(proj, heads, kv_heads, D), value_view(proj, heads, kv_heads, D)
    q, k = (torch.randn(count + 15, h, D, device=DEVICE).bfloat16() for h in (heads, kv_heads))
    out = torch.full((count + 15, heads * D), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    attention.attention_prefill_fresh(q, k, v, gate, D**-0.5, out)
    expected = oracle(q[:count], gate[:count], k[:count], v[:count], 0)
    assert relative(out[:count].unflatten(1, (heads, D)), expected) < 6e-3


def test_bad_input():
    with pytest.raises(ValueError, match="at most 16"):
        attention.make_workspace(1, 0, 0, 34, 2, D, DEVICE)
    work = attention.make_workspace(1, 0, 0, 2, 1, D, DEVICE)
    with pytest.raises(ValueError, match="2 decode rows in a workspace of 1"):
        attention.plan(work, torch.zeros(2, dtype=torch.int32, device=DEVICE))
    q, gate = queries(1, 2, 1)
    cache = torch.zeros(2, 16, 1, D, device=DEVICE).to(torch.float8_e4m3fn)
    ints = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="kv_scales"):
        attention.attention_decode(q, gate, cache, cache, ints, ints[0], 1.0, work, q)
