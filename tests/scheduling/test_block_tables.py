"""The runner's block tables follow a request whose leading blocks are replaced by those of an equal cached prefix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, StepPlan
from tests.scheduling.driver import Driver, fuzz, small_config


def watch_tables(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Check the table of every row of every launched plan; returns a counter of checked rows."""
    from sparkinfer.runner.batch import BatchBuilder

    init, launch = Driver.__init__, Driver.launch
    checked = 0

    def with_tables(self: Driver, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        builder = BatchBuilder(self.config.max_num_seqs, self.config.max_model_len, torch.float32, torch.device("cpu"))
        self.tables = builder.tables  # type: ignore[attr-defined]

    def launch_and_compare(self: Driver) -> bool:
        nonlocal checked
        started = launch(self)
        plan: StepPlan | None = self.launched[-1] if started else None
        for row in plan.rows if plan else []:
            self.tables.update(row)  # type: ignore[attr-defined]
            used = -(-(row.start + row.length) // KV_BLOCK_TOKENS)
            line = self.tables.array[row.slot, :used].tolist()  # type: ignore[attr-defined]
            assert line == row.blocks[:used]
            checked += 1
        return started

    monkeypatch.setattr(Driver, "__init__", with_tables)
    monkeypatch.setattr(Driver, "launch", launch_and_compare)
    return lambda: checked


def test_tables_follow_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = watch_tables(monkeypatch)
    for seed in range(60):
        fuzz(20_000 + seed, 200)
    assert checked() > 5_000


def test_tables_follow_an_adoption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal prompts in one pass: the second one's leading blocks change, its last one does not."""
    watch_tables(monkeypatch)
    engine = Driver(small_config(prefill_chunk=256, own_pass_tokens=1000, num_kv_blocks=64, max_in_flight=1))
    first, second = (engine.add(list(range(90)), 20, stops=False) for _ in range(2))
    engine.step()
    assert first.blocks[:4] == second.blocks[:4]
    assert first.blocks[-1] != second.blocks[-1]
    engine.drain()
