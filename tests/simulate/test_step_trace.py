"""The step trace: what the engine writes for each step, and that it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkinfer.engine.core import EngineCore
from sparkinfer.engine.step_trace import SCHEMA, StepTrace, traced
from sparkinfer.errors import ConfigError
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import Request, SamplingParams, StepPlan, StepResult


class Sevens:
    """Answers every row with token 7."""

    def __init__(self) -> None:
        self._launched: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        sampled = sum(row.samples for row in plan.rows)
        return StepResult(plan.step_id, [7] * sampled, [None] * sampled)

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    def collect(self) -> StepResult:
        return self.execute(self._launched.pop(0))


def config(in_flight: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=4,
        num_kv_blocks=64,
        max_model_len=256,
        mixed_chunk=64,
        prefill_chunk=128,
        num_snapshots=8,
        max_in_flight=in_flight,
    )


@pytest.mark.parametrize("in_flight", [1, 2])
def test_every_step_is_written_with_what_it_held(tmp_path: Path, in_flight: int) -> None:
    path = tmp_path / "steps.jsonl"
    for start in range(2):
        schedule = config(in_flight)
        trace = StepTrace(path, schedule, {"device": "cpu"})
        core = EngineCore(traced(Sevens(), trace, schedule), schedule)
        core.add(Request("a", list(range(150)), SamplingParams(max_tokens=4, temperature=0.0)))
        core.add(Request("b", list(range(30)), SamplingParams(max_tokens=2, temperature=0.5, logprobs=1)))
        while core.has_work:
            core.step()
        steps = core.scheduler.stats().steps
        trace.close()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(lines) == (steps + 1) * (start + 1), "the second start continues the file"
    header, rows = lines[0], lines[1 : steps + 1]
    assert header["schema"] == SCHEMA
    assert SchedulerConfig(**header["scheduler"]) == config(in_flight)
    assert sum(row["n"] for row in rows) == 6
    chunks = [chunk for row in rows for chunk in row.get("p", [])]
    assert sum(length for _, length, _ in chunks) == 180
    assert sum(age >= 0 for _, _, age in chunks) == 2, "the first chunk of a request says how long it has waited"
    assert sum(row.get("g", 0) for row in rows) == sum(row.get("l", 0) for row in rows) == 2
    assert sum(row["d"] for row in rows) == 4
    assert all(row["s"] >= 0 for row in rows)
    assert [row["t"] for row in rows] == sorted(row["t"] for row in rows)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SPARKINFER_STEP_TRACE"):
        StepTrace(tmp_path / "absent" / "steps.jsonl", config(1), {})
