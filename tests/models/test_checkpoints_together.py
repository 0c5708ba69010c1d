"""Scans and checkpoint copies of different prompts in one pass do not wait for each other."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import torch
from sparkinfer_kernels.gated_delta_rule.reference import num_chunks

from sparkinfer.runner.gpu_queue import Queue
from sparkinfer.runner.gpu_snapshots import SnapshotPool

LENGTHS = (200, 70, 40)
MARKS = [[(64, 0), (192, 1)], [(64, 2)], [(32, 3)]]


def test_a_pass_scans_all_prompts_at_once_and_saves_from_inside(checkpoint, make_driver, prompt):
    """One scan a layer, as many steps long as the longest prompt, that is given the checkpoints of every prompt."""
    folder, _ = checkpoint("dense")
    driver = make_driver(folder)
    requests = [driver.add(prompt(length, length)) for length in LENGTHS]
    ops, original, scans = driver.runner.ops, driver.runner.ops.chunk_gated_delta_rule, []

    def spy(qk, v, g, beta, state, layout, save_to=(), out=None):
        scans.append((len(qk), len(state), len(layout.steps), len(save_to)))
        return original(qk, v, g, beta, state, layout, save_to, out)

    try:
        object.__setattr__(ops, "chunk_gated_delta_rule", spy)  # The table of kernels is frozen.
        driver.run([driver.row(request, marks=marks) for request, marks in zip(requests, MARKS, strict=True)])
    finally:
        object.__setattr__(ops, "chunk_gated_delta_rule", original)
    longest = num_chunks(0, max(LENGTHS))
    assert longest < sum(num_chunks(0, length) for length in LENGTHS)
    assert scans == [(sum(LENGTHS), 3, longest, 4)] * driver.runner.config.num_linear_layers
    caches = driver.runner.caches
    for length, marks in zip(LENGTHS, MARKS, strict=True):
        for position, snapshot in marks:
            alone = make_driver(folder)
            short = alone.add(prompt(length, length)[:position])
            alone.run([alone.row(short)])
            expected = alone.runner.caches.state[:, alone.slot_of[short]]
            torch.testing.assert_close(caches.snapshot_state[snapshot], expected, rtol=0, atol=2e-4)


class Recorder(Queue):
    """Streams by name; an event is a stream and how much it had been given."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.main, self.save, self.load = "main", "save", "load"
        self.count = itertools.count()
        self.log: list[tuple] = []

    @contextmanager
    def on(self, stream):
        self.log.append(("copy", stream))
        yield

    def mark(self, stream):
        return stream, next(self.count)

    def wait(self, stream, event):
        if event is not None:
            self.log.append(("wait", stream, event[0]))


def test_copies_to_the_host_hold_up_neither_the_next_prompt_s_nor_the_passes():
    """The stream of the passes makes one copy on the device for each checkpoint and waits for nothing; it waits for a
    copy to the host only where more checkpoints are under way than the ring has entries."""
    queue, state, window = Recorder(), torch.randn(3, 2, 4, 4), torch.randn(3, 2, 3, 8)
    pool = SnapshotPool(queue, (state[0], window[0]), 4, ring=3)
    pool.save(((state[index], window[index]), index) for index in range(3))
    one = [("copy", "main"), ("wait", "save", "main"), ("copy", "save")]
    assert queue.log == one * 3
    assert torch.equal(pool.state[:3], state)
    assert torch.equal(pool.window[:3], window)
    queue.log.clear()
    pool.save([((state[0], window[0]), 3)])
    assert queue.log == [("wait", "main", "save"), *one]
