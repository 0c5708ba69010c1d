"""The GPU kernels of Gated DeltaNet: in Triton's interpreter here, compiled where there is a GPU.

Expected values come from the recurrence, token by token in fp64. Operands are bf16, so errors of some 1e-3 are theirs.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import torch
from gdn_reference import EPS, D, Layer, make_layer, make_proj, relative, run
from interpreter_fixes import fix_interpreter
from sparkinfer_kernels.gated_delta_rule.gpu import (
    Checkpoints,
    Heads,
    gdn_decode,
    gdn_prefill,
    make_decode_workspace,
    make_prefill_workspace,
    max_chunks,
    plan_prefill,
    tuning_for,
)
from sparkinfer_kernels.gated_delta_rule.tuned import tunings

fix_interpreter()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 7
DUMMY = SLOTS - 1
OUT, STATE = 6e-3, 8e-3
"""Allowed ||error|| / ||expected||."""


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def prefill(layer: Layer, sequences, wanted=(), padding=0, repeat=False, seed=5, check=True, tuning=None):
    """Run (start, length, slot) sequences with checkpoints (sequence, position); compare all with the recurrence.

    Returns (out, checkpoints).
    """
    lengths = [length for _, length, _ in sequences]
    edges = [0, *itertools.accumulate(lengths)]
    starts, slots = ints([s for s, _, _ in sequences]), ints([slot for _, _, slot in sequences])
    tokens = edges[-1] + padding
    proj = make_proj(layer, tokens, seed, repeat)
    windows, states = layer.window.clone(), layer.state.clone()
    workspace = make_prefill_workspace(tokens, len(sequences), Heads(layer.hk, layer.hv), DEVICE)
    checkpoints = None
    if wanted:
        checkpoints = Checkpoints(
            ints([sequence for sequence, _ in wanted]),
            ints([position for _, position in wanted]),
            torch.full((len(wanted), layer.hv, D, D), float("nan"), device=DEVICE),
            torch.full((len(wanted), 3, layer.channels), float("nan"), dtype=torch.bfloat16, device=DEVICE),
        )
    cu_seqlens = ints(edges)
    plan_prefill(workspace, cu_seqlens, starts, tokens, checkpoints)
    out = torch.full((tokens, layer.hv * D), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    gdn_prefill(
        proj, layer.window, layer.state, slots, cu_seqlens, starts, *layer.weights(), EPS, out,
        workspace=workspace, checkpoints=checkpoints, tuning=tuning,
    )  # fmt: skip
    if check:
        for number, (start, length, slot) in enumerate(sequences):
            if length:
                part = slice(edges[number], edges[number + 1])
                marks = [(n, at - start) for n, (owner, at) in enumerate(wanted) if owner == number]
                zero = 1 if start else 0
                expected = run(layer, proj[part], windows[slot] * zero, states[slot] * zero)
                check_sequence(layer, slot, out[part], expected, marks, checkpoints)
        check_others(layer, windows, states, {slot for _, length, slot in sequences if length})
    assert (out[edges[-1] :] == 0).all()
    return out, checkpoints


def check_sequence(layer, slot, out, expected, marks, checkpoints):
    values, states, windows = expected
    assert relative(out, values) < OUT
    assert relative(layer.state[slot], states[-1]) < STATE
    assert torch.equal(layer.window[slot], windows[-1].bfloat16())
    for n, count in marks:
        assert relative(checkpoints.state[n], states[count - 1]) < STATE
        assert torch.equal(checkpoints.window[n], windows[count - 1].bfloat16())


def check_others(layer, windows, states, used):
    """Slots outside the pass keep every bit."""
    for slot in set(range(SLOTS)) - used:
        assert torch.equal(layer.window[slot], windows[slot])
        assert torch.equal(layer.state[slot], states[slot])


@pytest.mark.parametrize(("hk", "hv"), [(1, 2), (2, 6), (2, 2)])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_decode_steps(hk, hv, state_dtype):
    """Two steps of rows in any slots with padding between them; other slots untouched, tickets back at zero."""
    layer = make_layer(hk, hv, SLOTS, 1, DEVICE, state_dtype)
    workspace = make_decode_workspace(8, hk, DEVICE)
    slots = [3, DUMMY, 0, 5, DUMMY]
    for step in range(2):
        proj = make_proj(layer, len(slots), 10 + step)
        windows, states = layer.window.clone(), layer.state.clone()
        out = torch.full((len(slots), hv * D), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        gdn_decode(proj, layer.window, layer.state, ints(slots), *layer.weights(), EPS, out, workspace=workspace)
        for row, slot in enumerate(slots):
            if slot == DUMMY:
                assert (out[row] == 0).all()
                continue
            values, after, window = run(layer, proj[row : row + 1], windows[slot], states[slot])
            assert relative(out[row], values[0]) < 4e-3
            assert relative(layer.state[slot], after[-1]) < (1e-6 if state_dtype == torch.float32 else 3e-3)
            assert torch.equal(layer.window[slot], window[-1].bfloat16())
        check_others(layer, windows, states, set(slots) - {DUMMY})
        assert (workspace.tickets == 0).all()


RAGGED = [
    [(0, 65, 3), (37, 40, 1), (0, 1, 0), (10, 2, 2), (0, 0, DUMMY), (0, 0, DUMMY)],
    [(0, 200, 0), (64, 64, 5), (63, 2, 2)],
    [(1, 63, 4), (16, 16, 1), (15, 17, 0), (0, 15, 3)],
    [(100, 127, 2)],
]
MARKS = [
    [(0, 16), (0, 65), (1, 48), (1, 64), (1, 77), (3, 11), (-1, 0)],
    [(0, 1), (0, 2), (0, 64), (0, 100), (0, 199), (0, 200), (1, 128), (2, 64)],
    [(0, 2), (0, 64), (2, 16), (2, 32), (3, 3)],
    [(0, 112), (0, 113), (0, 127), (0, 128), (0, 129), (0, 227)],
]


@pytest.mark.parametrize("case", range(len(RAGGED)))
def test_ragged_prefill(case):
    """Restored and fresh sequences, padding sequences and rows, checkpoints at, around and between chunk edges."""
    prefill(make_layer(1, 2, SLOTS, case, DEVICE), RAGGED[case], MARKS[case], padding=case * 3)


def test_repeated_keys():
    """The same key over and over, written with full strength: where expanding the inverse in powers would cancel."""
    prefill(make_layer(1, 2, SLOTS, 1, DEVICE), [(5, 130, 3)], repeat=True)


def test_grouped_heads_and_padding_only():
    prefill(make_layer(2, 6, SLOTS, 2, DEVICE), [(0, 70, 1), (0, 0, DUMMY)], [(0, 70)], padding=130)
    prefill(make_layer(1, 2, SLOTS, 3, DEVICE), [(0, 0, DUMMY), (0, 0, DUMMY)], padding=66)


def test_split_at_a_chunk_edge_changes_no_bit():
    """Chunks are cut in the sequence's own positions: a prompt in two passes, cut at 64, equals one pass, also at its
    checkpoints; and a checkpoint equals the end of a pass that stops there."""
    whole, cut, short = (make_layer(1, 2, SLOTS, 4, DEVICE) for _ in range(3))
    out, saved = prefill(whole, [(0, 150, 2)], [(0, 64), (0, 83), (0, 150)], seed=9, check=False)
    projections = make_proj(whole, 150, 9)

    def part(layer, start, length):
        workspace = make_prefill_workspace(length, 1, Heads(1, 2), DEVICE)
        edges, starts = ints([0, length]), ints([start])
        plan_prefill(workspace, edges, starts, length)
        rows = projections[start : start + length]
        weights = layer.weights()
        return gdn_prefill(
            rows, layer.window, layer.state, ints([2]), edges, starts, *weights, EPS, workspace=workspace
        )  # fmt: skip

    first, second = part(cut, 0, 64), part(cut, 64, 86)
    assert torch.equal(torch.cat([first, second]), out)
    assert torch.equal(cut.state[2], whole.state[2])
    assert torch.equal(cut.window[2], whole.window[2])
    part(short, 0, 83)
    assert torch.equal(short.state[2], saved.state[1])
    assert torch.equal(short.window[2], saved.window[1])
    assert torch.equal(whole.state[2], saved.state[2])


def test_decode_continues_prefill():
    """A prompt's last tokens through the decode kernel end where the prefill of the whole prompt ends."""
    whole, split = (make_layer(1, 2, SLOTS, 6, DEVICE) for _ in range(2))
    out, _ = prefill(whole, [(0, 40, 2)], seed=3, check=False)
    projections = make_proj(split, 40, 3)
    workspace = make_prefill_workspace(37, 1, Heads(1, 2), DEVICE)
    edges, starts = ints([0, 37]), ints([0])
    plan_prefill(workspace, edges, starts, 37)
    weights = split.weights()
    gdn_prefill(
        projections[:37], split.window, split.state, ints([2]), edges, starts, *weights, EPS, workspace=workspace
    )  # fmt: skip
    tickets = make_decode_workspace(1, 1, DEVICE)
    for token in range(37, 40):
        row = projections[token : token + 1]
        got = gdn_decode(row, split.window, split.state, ints([2]), *weights, EPS, workspace=tickets)
        assert relative(got, out[token : token + 1]) < 2 * OUT
    assert relative(split.state[2], whole.state[2]) < 2 * STATE
    assert torch.equal(split.window[2], whole.window[2])


def test_max_chunks_covers_every_split():
    for tokens, sequences in itertools.product((1, 2, 63, 64, 65, 130), (1, 2, 5)):
        base, rest = divmod(tokens, sequences)
        lengths = [base + (n < rest) for n in range(sequences)]
        worst = sum((63 + n - 1) // 64 + 1 for n in lengths if n)
        assert worst <= max_chunks(tokens, sequences)


def test_bad_shapes_are_named():
    layer = make_layer(1, 2, SLOTS, 1, DEVICE)
    workspace = make_decode_workspace(1, 1, DEVICE)
    with pytest.raises(ValueError, match="tickets"):
        gdn_decode(make_proj(layer, 2, 1), layer.window, layer.state, ints([0, 1]), *layer.weights(), EPS,
                   workspace=workspace)  # fmt: skip
    with pytest.raises(ValueError, match="adjacent elements"):
        gdn_decode(make_proj(layer, 1, 1)[:, 1:], layer.window, layer.state, ints([0]), *layer.weights(), EPS,
                   workspace=workspace)  # fmt: skip
    with pytest.raises(ValueError, match="does not fit"):
        plan_prefill(make_prefill_workspace(4, 1, Heads(1, 2), DEVICE), ints([0, 5]), ints([0]), 5)


@pytest.mark.gpu
@pytest.mark.parametrize(("hk", "hv"), [(16, 48), (16, 32)])
def test_fla_640_983_984_real_heads(hk, hv):
    layer = make_layer(hk, hv, SLOTS, 8, DEVICE)
    prefill(layer, [(0, 300, 3), (1000, 129, 1), (64, 1, 0)], [(0, 256), (0, 299), (1, 1024), (1, 1100)], padding=7)
    workspace = make_decode_workspace(8, hk, DEVICE)
    slots = [3, DUMMY, 0, 1]
    proj = make_proj(layer, 4, 10)
    windows, states = layer.window.clone(), layer.state.clone()
    out = gdn_decode(proj, layer.window, layer.state, ints(slots), *layer.weights(), EPS, workspace=workspace)
    for row, slot in enumerate(slots):
        if slot != DUMMY:
            values, after, window = run(layer, proj[row : row + 1], windows[slot], states[slot])
            assert relative(out[row], values[0]) < 4e-3
            assert relative(layer.state[slot], after[-1]) < 1e-6
            assert torch.equal(layer.window[slot], window[-1].bfloat16())


SMALL = [(1, 20, 4), (0, 66, 1)], [(0, 16), (1, 64), (1, 66)]
"""What the interpreter can run of a case with every launch parameter: sequences and checkpoints."""
ON_CARD = pytest.mark.gpu


@pytest.mark.parametrize("heads", [(1, 2), pytest.param((2, 6), marks=ON_CARD)], ids=str)
@pytest.mark.parametrize("columns", [16, 32, 64, 128])
def test_fla_640_983_984_every_width_of_the_scan(columns, heads):
    shipped = tuning_for(torch.device(DEVICE))
    scan = replace(shipped.scan, block=columns, narrow=columns // 2 if columns > 16 else 0)
    checkpoint = replace(shipped.checkpoint, block=columns)
    tuning = replace(shipped, scan=scan, checkpoint=checkpoint)
    sequences, wanted = (RAGGED[0], MARKS[0]) if DEVICE == "cuda" else SMALL
    prefill(make_layer(*heads, SLOTS, 8, DEVICE), sequences, wanted, tuning=tuning)


@pytest.mark.parametrize("entry", sorted(tunings()))
@pytest.mark.parametrize(
    ("hk", "hv"), [(1, 2), *(pytest.param(*heads, marks=ON_CARD) for heads in [(2, 6), (16, 48), (16, 32)])]
)
def test_fla_640_983_984_every_entry_of_the_tuning_table(entry, hk, hv):
    """Prefill, and decoding of few rows and of many, as each entry launches them."""
    tuning = tunings()[entry]
    sequences, wanted = (RAGGED[1], MARKS[1]) if DEVICE == "cuda" else SMALL
    prefill(make_layer(hk, hv, SLOTS, 8, DEVICE), sequences, wanted, tuning=tuning)
    layer, workspace = make_layer(hk, hv, 20, 9, DEVICE), make_decode_workspace(16, hk, DEVICE)
    for slots in ([4, 2, 19], [*range(16)]):
        proj = make_proj(layer, len(slots), 10 + len(slots))
        windows, states = layer.window.clone(), layer.state.clone()
        out = gdn_decode(
            proj, layer.window, layer.state, ints(slots), *layer.weights(), EPS, workspace=workspace, tuning=tuning
        )
        for row, slot in enumerate(slots[:-1]):
            values, after, window = run(layer, proj[row : row + 1], windows[slot], states[slot])
            assert relative(out[row], values[0]) < 4e-3
            assert relative(layer.state[slot], after[-1]) < 1e-6
            assert torch.equal(layer.window[slot], window[-1].bfloat16())


class RaggedStep:
    """A step of up to 6 decode rows and up to 4 prompts in 320 rows, everything on the device at fixed addresses."""

    rows, sequences, wanted = 6, 4, 5

    def __init__(self, hk: int = 2, hv: int = 6, longest: int = 80) -> None:
        self.heads, self.longest, self.tokens = Heads(hk, hv), longest, self.sequences * longest
        self.layer = make_layer(hk, hv, 12, 21, DEVICE)
        self.proj = make_proj(self.layer, self.rows + self.tokens, 22)
        self.decode_slots, self.slots = ints([11] * self.rows), ints([11] * self.sequences)
        self.edges, self.starts = ints([0] * (self.sequences + 1)), ints([0] * self.sequences)
        self.checkpoints = Checkpoints(
            ints([-1] * self.wanted),
            ints([0] * self.wanted),
            torch.zeros(self.wanted, hv, D, D, device=DEVICE),
            torch.zeros(self.wanted, 3, self.layer.channels, dtype=torch.bfloat16, device=DEVICE),
        )
        self.new_workspaces()
        self.out = torch.zeros(self.rows + self.tokens, hv * D, dtype=torch.bfloat16, device=DEVICE)

    def new_workspaces(self) -> None:
        self.tickets = make_decode_workspace(self.rows, self.heads.key, DEVICE)
        self.workspace = make_prefill_workspace(self.tokens, self.sequences, self.heads, DEVICE)

    def run(self) -> None:
        layer, n = self.layer, self.rows
        plan_prefill(self.workspace, self.edges, self.starts, self.tokens, self.checkpoints)
        gdn_decode(
            self.proj[:n], layer.window, layer.state, self.decode_slots, *layer.weights(), EPS, self.out[:n],
            workspace=self.tickets,
        )  # fmt: skip
        gdn_prefill(
            self.proj[n:], layer.window, layer.state, self.slots, self.edges, self.starts, *layer.weights(), EPS,
            self.out[n:], workspace=self.workspace, checkpoints=self.checkpoints,
        )  # fmt: skip

    def draw(self, g: torch.Generator) -> set[int]:
        """New lengths, slots and checkpoints; returns the slots in use."""
        slots = torch.randperm(11, generator=g).tolist()
        decode = int(torch.randint(0, self.rows + 1, (1,), generator=g))
        prompts = int(torch.randint(0, self.sequences + 1, (1,), generator=g))
        lengths = [int(torch.randint(1, self.longest, (1,), generator=g)) for _ in range(prompts)]
        starts = [int(torch.randint(0, 3, (1,), generator=g)) * 37 for _ in range(prompts)]
        empty = self.sequences - prompts
        self.decode_slots.copy_(ints(slots[:decode] + [11] * (self.rows - decode)))
        self.slots.copy_(ints(slots[decode : decode + prompts] + [11] * empty))
        self.edges.copy_(ints([0, *itertools.accumulate(lengths + [0] * empty)]))
        self.starts.copy_(ints(starts + [0] * empty))
        marks = [(n, s + length) for n, (s, length) in enumerate(zip(starts, lengths, strict=True))]
        unused = self.wanted - len(marks)
        self.checkpoints.sequence.copy_(ints([n for n, _ in marks] + [-1] * unused))
        self.checkpoints.position.copy_(ints([at for _, at in marks] + [0] * unused))
        return set(slots[: decode + prompts])

    def tensors(self) -> list[torch.Tensor]:
        saved = self.checkpoints
        return [self.layer.state, self.layer.window, self.out, saved.state, saved.window]


def test_flashinfer_3329_ragged_steps_leave_nothing_in_their_workspaces():
    """What a replay must not depend on, where there is no graph: a step over workspaces that others used does, bit for
    bit, what it does over new ones; tickets are back at zero, slots outside the step keep every bit."""
    step, g = RaggedStep(1, 2, 24), torch.Generator().manual_seed(23)
    for _ in range(4):
        used = step.draw(g)
        before = [tensor.clone() for tensor in step.tensors()]
        step.run()
        assert (step.tickets.tickets == 0).all()
        expected = [tensor.clone() for tensor in step.tensors()]
        for tensor, old in zip(step.tensors(), before, strict=True):
            tensor.copy_(old)
        kept = step.tickets, step.workspace
        step.new_workspaces()
        step.run()
        step.tickets, step.workspace = kept
        for tensor, wanted in zip(step.tensors(), expected, strict=True):
            assert torch.equal(tensor, wanted)
        idle = sorted(set(range(12)) - used)
        assert torch.equal(step.layer.state[idle], before[0][idle])
        assert torch.equal(step.layer.window[idle], before[1][idle])
        assert torch.isfinite(step.out).all()


@pytest.mark.gpu
def test_flashinfer_3329_five_hundred_ragged_replays():
    """Replays of one graph over changing lengths and slots do, bit for bit, what launches do, and end in time; slots
    outside a step and the dummy keep every bit."""
    step, g = RaggedStep(), torch.Generator().manual_seed(23)
    step.draw(g)
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for _ in range(500):
        used = step.draw(g)
        before = [tensor.clone() for tensor in step.tensors()]
        step.run()
        expected = [tensor.clone() for tensor in step.tensors()]
        for tensor, old in zip(step.tensors(), before, strict=True):
            tensor.copy_(old)
        graph.replay()
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + 5
        while not done.query():
            assert time.monotonic() < deadline, "a replay did not end within 5 seconds"
        for tensor, wanted in zip(step.tensors(), expected, strict=True):
            assert torch.equal(tensor, wanted)
        idle = sorted(set(range(12)) - used)
        assert torch.equal(step.layer.state[idle], before[0][idle])
        assert torch.equal(step.layer.window[idle], before[1][idle])
        assert torch.isfinite(step.out).all()
