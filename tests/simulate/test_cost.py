"""The cost model: its solver, that it finds costs that were put in, and that it survives a file."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
from sparkinfer_eval.simulate import cost
from sparkinfer_eval.simulate.cost import Costs, Host, fit, nnls
from sparkinfer_eval.simulate.steps import HOST_FEATURES, PASS_FEATURES, Step, pass_features, read_trace

from sparkinfer.engine.core import EngineCore
from sparkinfer.engine.step_trace import SCHEMA, StepTrace, traced
from sparkinfer.errors import ConfigError
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import Request, SamplingParams, StepPlan, StepResult

CONFIG = SchedulerConfig(max_num_seqs=8, num_kv_blocks=512, max_model_len=1024, mixed_chunk=256, num_snapshots=8)


def brute_force(a: np.ndarray, b: np.ndarray) -> float:
    """Least residual over all sets of positive columns."""
    best = float(np.linalg.norm(b))
    for mask in range(1, 1 << a.shape[1]):
        chosen = [i for i in range(a.shape[1]) if mask >> i & 1]
        x = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
        if (x >= 0).all():
            best = min(best, float(np.linalg.norm(a[:, chosen] @ x - b)))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_nnls_finds_the_least_residual(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(30, 6))
    a[:, 5] = a[:, 4] if seed % 2 else a[:, 5]  # Equal columns have many solutions, one residual.
    b = a @ rng.normal(size=6) + rng.normal(size=30) * 0.1
    x = nnls(a, b)
    assert (x >= 0).all()
    assert np.linalg.norm(a @ x - b) == pytest.approx(brute_force(a, b), rel=1e-8)


def lines(count: int) -> list[dict]:
    """Plausible steps: decode only, mixed, prefill only."""
    rng = random.Random(3)
    found = []
    for number in range(count):
        decode = rng.randrange(0, 33) if number % 3 else rng.randrange(1, 33)
        line = {"d": decode, "dc": decode * rng.randrange(20, 900), "n": decode}
        if number % 3 == 0:
            line["p"] = [(0, rng.randrange(16, 500), 100) for _ in range(rng.randrange(1, 5))]
            line["n"] += len(line["p"])
        found.append(line)
    return found


def test_costs_that_were_put_in_are_found() -> None:
    true = dict.fromkeys(PASS_FEATURES, 0.0) | {
        "pass": 2e-3, "decode rows": 1e-4, "decode context (1k tokens)": 5e-5, "prompt tokens": 2e-5,
    }  # fmt: skip
    weights = [true[name] for name in PASS_FEATURES]
    rng, steps, now = random.Random(1), [], 0.0
    for line in lines(600):
        seconds = float(np.dot(weights, pass_features(line))) * rng.uniform(0.9, 1.1)
        steps.append(Step(now, seconds, line))
        now += seconds + 1e-4 + 2e-5 * line["n"]
    costs = fit([steps], Host(), CONFIG, {})
    assert abs(cost.error_of(costs, steps)) < 0.01
    found = dict(zip(PASS_FEATURES, costs.pass_weights, strict=True))
    for name in ("pass", "decode rows", "prompt tokens"):
        assert found[name] == pytest.approx(true[name], rel=0.15)
    host = dict(zip(HOST_FEATURES, costs.host_weights, strict=True))
    assert host["step"] == pytest.approx(1e-4, rel=0.1)
    assert host["tokens"] == pytest.approx(2e-5, rel=0.1)


def test_steps_that_were_held_up_scatter_and_do_not_move_the_model() -> None:
    rng, steps, now = random.Random(1), [], 0.0
    weights = [0.004, 0.0002] + [0.0] * (len(PASS_FEATURES) - 2)
    for number, line in enumerate(lines(600)):
        seconds = (
            float(np.dot(weights, pass_features(line))) * rng.uniform(0.99, 1.01) * (3.0 if number % 5 == 4 else 1)
        )
        steps.append(Step(now, seconds, line))
        now += seconds
    costs = fit([steps], Host(), CONFIG, {})
    assert costs.pass_weights[0] == pytest.approx(0.004, rel=0.02)
    assert costs.pass_weights[1] == pytest.approx(0.0002, rel=0.05)
    for factors in (costs.scatter["decode"], costs.scatter["prompt"]):
        assert np.mean(factors) == pytest.approx(1.4, rel=0.05)
        assert np.median(factors) == pytest.approx(1.0, abs=0.02)


def test_scatter_stands_for_all_values() -> None:
    assert cost.scatter([]) == []
    assert cost.scatter([3.0]) == [3.0]
    assert np.mean(cost.scatter(np.arange(1000.0))) == pytest.approx(499.5, abs=1)


def test_time_without_work_is_no_cost() -> None:
    line = {"d": 4, "dc": 400, "n": 4}
    steps = [Step(number * 10.0, 0.01, line) for number in range(100)]
    assert fit([steps], Host(), CONFIG, {}).host_weights == [0.0] * len(HOST_FEATURES)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        fit([[Step(0.0, 0.01, {"d": 1, "dc": 1, "n": 1})]], Host(), CONFIG, {})


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    host = Host(0.001, scatter={"ingest": [-0.001, 0.001]})
    weights = [1e-3] * len(PASS_FEATURES), [1e-4] * len(HOST_FEATURES)
    costs = Costs(*weights, host, CONFIG, {"run": "x"}, Host(0.002), {"decode": [0.9, 1.1]}, weights[1])
    path = tmp_path / "new" / "costs.json"
    cost.save(costs, path)
    assert cost.load(path) == costs
    assert "1000 x pass" in costs.describe()
    document = json.loads(path.read_text())
    del document["pass_weights"]["restores"]
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="not a cost model"):
        cost.load(path)


class Slow:
    """A runner that answers at once."""

    def execute(self, plan: StepPlan) -> StepResult:
        sampled = sum(row.samples for row in plan.rows)
        return StepResult(plan.step_id, [7] * sampled, [None] * sampled)

    def launch(self, plan: StepPlan) -> None:
        raise NotImplementedError

    def collect(self) -> StepResult:
        raise NotImplementedError


def test_a_trace_is_read_back_with_a_cut_last_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    trace = StepTrace(path, CONFIG, {"device": "cpu"})
    core = EngineCore(traced(Slow(), trace, CONFIG), CONFIG)
    core.add(Request("a", list(range(100)), SamplingParams(max_tokens=40)))
    while core.has_work:
        core.step()
    trace.close()
    with path.open("a") as file:
        file.write('{"t": 12.5, "s":')
    read = read_trace(path)
    assert read.scheduler == CONFIG
    assert read.about == {"device": "cpu"}
    assert len(read.steps) == 40
    assert read.between(read.steps[3].wall_s, read.steps[9].wall_s) == read.steps[3:9]
    begun = read.steps[0].line["p"]
    assert begun[0][:2] == [0, 100]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no steps"),
        (json.dumps({"schema": "other/v1"}) + "\n{}\n{}", "schema is 'other/v1'"),
        (json.dumps({"schema": SCHEMA, "epoch": 0, "scheduler": {"colour": 1}}) + "\n{}\n{}", "not a line"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(tmp_path / "x.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "absent.jsonl")
    (tmp_path / "binary").write_bytes(b"\x80\xff\x00")
    with pytest.raises(ConfigError, match=r"binary cannot be read"):
        read_trace(tmp_path / "binary")


@pytest.mark.parametrize(
    "text",
    [
        '{"t": 1, "s": 1}',
        '{"t": 1, "s": 1, "d": "x", "dc": 0, "n": 0}',
        '{"t": NaN, "s": 1, "d": 0, "dc": 0, "n": 0}',
        '{"t": 1, "s": 1, "d": 0, "dc": 0, "n": 0, "p": [[1, 2], [1, 2, 3, 4]]}',
    ],
)
def test_steps_without_their_numbers_are_named(tmp_path: Path, text: str) -> None:
    header = json.dumps({"schema": SCHEMA, "epoch": 0, "scheduler": dataclasses.asdict(CONFIG)})
    step = '{"t": 1, "s": 1, "d": 0, "dc": 0, "n": 0, "p": [[0, 5, -1]]}'
    (tmp_path / "x.jsonl").write_text("\n".join([header, step, text, step]))
    with pytest.raises(ConfigError, match=r"x\.jsonl:3: not a line"):
        read_trace(tmp_path / "x.jsonl")
