"""The simulation against arithmetic done by hand, a recorded run made by one, and the command line."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest
from sparkinfer_eval import metrics
from sparkinfer_eval.cells import Cell, load_cells, resolve_cells
from sparkinfer_eval.records import RawResult, Record, write_records
from sparkinfer_eval.simulate import cli, compare
from sparkinfer_eval.simulate.cost import Costs, Host, save
from sparkinfer_eval.simulate.measured import fit_run, lone_requests, read_run, read_runs
from sparkinfer_eval.simulate.replay import Simulation, simulate
from sparkinfer_eval.simulate.steps import HOST_FEATURES, PASS_FEATURES, PAUSE_S
from sparkinfer_eval.simulate.workload import Shape, Workload, of_cell, prompt_of, read_requests
from sparkinfer_eval.toy_model import ToySize, generate

from sparkinfer.engine.step_trace import SCHEMA, step_line
from sparkinfer.errors import ConfigError, RequestError
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import StepPlan

ENDS = ("*-c1", "*-c32")
ROOT = Path(__file__).resolve().parents[2]
CONFIG = SchedulerConfig(
    max_num_seqs=32, num_kv_blocks=4096, max_model_len=2048, mixed_chunk=1024, num_snapshots=64, branch_min_tokens=16
)


@pytest.fixture(autouse=True)
def few_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run here is simulated itself, without scatter: one simulation says as much as nine."""
    monkeypatch.setattr(compare, "SEEDS", 1)


def costs(host: Host | None = None, config: SchedulerConfig = CONFIG, **weights: float) -> Costs:
    """A cost model with the named features, in seconds."""
    given = {name.replace("_", " "): value for name, value in weights.items()}
    return Costs(
        [given.get(name, 0.0) for name in PASS_FEATURES],
        [given.get(f"host {name}", 0.0) for name in HOST_FEATURES],
        host or Host(),
        config,
        {"cells": []},
    )


def test_one_request_takes_what_its_steps_take() -> None:
    host = Host(ingest=0.002, egress=0.001)
    model = costs(host, **{"pass": 0.010, "prompt_tokens": 0.0001, "host_step": 0.0005})
    outcome = simulate(Workload("x", (Shape(100, 5),), 1), CONFIG, model)
    (record,) = outcome.records
    assert record.first_token_ns - record.start_ns == pytest.approx((0.002 + 0.010 + 0.010 + 0.001) * 1e9, abs=2)
    assert record.end_ns - record.first_token_ns == pytest.approx(4 * 0.0105 * 1e9, abs=5)
    assert (record.output_tokens, outcome.stats.steps) == (5, 5)


def test_a_closed_loop_keeps_its_concurrency() -> None:
    load = Workload("x", (Shape(50, 10),) * 40, 4)
    records = simulate(load, CONFIG, costs(Host(think=0.003), **{"pass": 0.01})).records
    edges = sorted([(r.start_ns, 1) for r in records] + [(r.end_ns, -1) for r in records])
    level = worst = 0
    for _, change in edges:
        level += change
        worst = max(worst, level)
    assert (len(records), worst) == (40, 4)
    ends, starts = sorted(r.end_ns for r in records), sorted(r.start_ns for r in records)[4:]
    assert all(start - end == pytest.approx(3e6, abs=2) for start, end in zip(starts, ends, strict=False))


def test_planned_arrivals_are_kept_and_the_server_takes_them_in_turn() -> None:
    load = Workload("x", tuple(Shape(20, 3, at_s=1.0) for _ in range(5)))
    model = dataclasses.replace(costs(**{"pass": 0.001}), open_host=Host(ingest=0.5))
    records = simulate(load, CONFIG, model).records
    assert all(record.start_ns == 1e9 for record in records)
    waits = [(record.first_token_ns - record.start_ns) / 1e9 for record in records]
    assert waits == pytest.approx([0.501, 1.001, 1.501, 2.001, 2.501], abs=1e-6)


def test_answers_that_end_together_are_dealt_with_one_by_one_before_the_next_requests_leave() -> None:
    load = Workload("x", (Shape(50, 10),) * 8, 4)
    records = simulate(load, CONFIG, costs(Host(turn=0.002, think=0.001, spacing=0.0005), **{"pass": 0.01})).records
    records = sorted(records, key=lambda r: r.start_ns)
    (end,) = {record.end_ns for record in records[:4]}
    waits = [(record.start_ns - end) / 1e9 for record in records[4:]]
    assert waits == pytest.approx([0.009, 0.0095, 0.010, 0.0105], abs=1e-6)


def test_a_seed_repeats_a_simulation_and_times_scatter_around_the_typical_ones() -> None:
    load = Workload("x", (Shape(50, 40),) * 24, 4)
    plain = costs(Host(think=0.002, scatter={"think": [-0.001, 0.0, 0.001]}), **{"pass": 0.01})
    model = dataclasses.replace(plain, scatter={"decode": [0.91, 0.98, 1.11], "prompt": [0.83, 1.17]})
    rates = [metrics.output_tok_s(simulate(load, CONFIG, model, seed).records) for seed in (1, 1, 2, 3)]
    typical = metrics.output_tok_s(simulate(load, CONFIG, model).records)
    assert rates[0] == rates[1]
    assert len({*rates, typical}) == 4
    assert all(rate == pytest.approx(typical, rel=0.05) for rate in rates)


def test_policies_differ_as_the_scheduler_s_do() -> None:
    """Separate prefill passes hold up decoding: with costs per pass, mixing has fewer steps and earlier ends."""
    load = Workload("x", tuple(Shape(128, 20 + number % 17) for number in range(96)), 16)
    model = costs(**{"pass": 0.01, "decode_rows": 0.0005, "prompt_tokens": 0.00005})
    mixed = simulate(load, CONFIG, model)
    apart = simulate(load, dataclasses.replace(CONFIG, mixed_chunk=0), model)
    assert mixed.stats.steps < apart.stats.steps
    assert metrics.output_tok_s(mixed.records) > metrics.output_tok_s(apart.records)
    for outcome in (mixed, apart):
        assert [r.output_tokens for r in sorted(outcome.records, key=lambda r: int(r.request_id))] == [
            shape.output_tokens for shape in load.shapes
        ]


def test_shared_prefixes_hit_the_cache() -> None:
    shapes = tuple(Shape(320, 2, at_s=float(n), prefix="system", prefix_tokens=256) for n in range(4))
    assert prompt_of(shapes[0], 0)[:256] == prompt_of(shapes[1], 1)[:256]
    assert prompt_of(shapes[0], 0)[256:] != prompt_of(shapes[1], 1)[256:]
    outcome = simulate(Workload("x", shapes), CONFIG, costs(**{"prompt_tokens": 0.001}))
    waits = [record.first_token_ns - record.start_ns for record in outcome.records]
    assert outcome.stats.prefix_hits_tokens == 2 * 256
    assert waits[0] == waits[1] > 3 * waits[2]


def test_a_request_that_cannot_run_is_refused() -> None:
    with pytest.raises(RequestError, match="exceeds the context"):
        simulate(Workload("x", (Shape(2048, 1),), 1), CONFIG, costs())


def cell(name: str) -> Cell:
    return resolve_cells(load_cells(ROOT / "config" / "cells.yaml"), "cpu")[name]


class Recording(Simulation):
    """A simulation that also writes the step trace that an engine would have written."""

    def record(self, epoch: float) -> list[str]:
        """Run, and the lines of the trace."""
        self.lines: list[str] = []
        self.epoch = epoch
        self.arrived: dict[int, float] = {}
        self.outcome = self.run()
        return self.lines

    def _send(self, starts: list[float]) -> None:
        super()._send(starts)
        self.arrived |= {number: at_s for at_s, number in self._arrivals}

    def _add(self, number: int) -> None:
        super()._add(number)
        self._scheduler.roster.by_id[str(number)].request.arrival_s = self.arrived[number]

    def _step(self, plan: StepPlan, now: float) -> float:
        line = step_line(plan, now, self._costs.pass_seconds(plan, now - self._ended_s >= PAUSE_S))
        self.lines.append(json.dumps({**line, "t": line["t"] + self.epoch}))
        return super()._step(plan, now)


TRUE = {
    "pass": 0.004, "decode_rows": 0.0004, "decode_context_(1k tokens)": 0.0001, "prompt_tokens": 0.0001,
    "prompts": 0.001, "after_a pause": 0.003, "host_step": 0.0003, "host_tokens": 0.00004,
}  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose measurements come from a cost model that is known."""
    run = tmp_path_factory.mktemp("results") / "0.1.0-cpu-00000000"
    host = Host(ingest=0.003, egress=0.001, issue=0.0005, turn=0.002, think=0.0005, spacing=0.0002, ingest_each=0.0008)
    model = costs(host, **TRUE)
    header = {"schema": SCHEMA, "epoch": 0.0, "scheduler": dataclasses.asdict(CONFIG), "device": "cpu"}
    lines, epoch = [json.dumps(header)], 1000.0
    for name in ("chat-c1", "chat-c4", "chat-c16", "chat-c32", "long_answer-c1", "long_prompt-c32", "poisson-r1"):
        definition = cell(name)
        recording = Recording(of_cell(definition), CONFIG, model)
        lines += recording.record(epoch)
        folder = run / "b1" / "sparkinfer" / "toy" / name / "r1"
        folder.mkdir(parents=True)
        records = [_shifted(record, round(epoch * 1e9)) for record in recording.outcome.records]
        write_records(folder / "records.jsonl", records)
        result = RawResult(
            run=run.name, block=1, engine="sparkinfer", engine_version="0", engine_digest="x", model="toy",
            model_digest="x", cell=name, rep=1, cell_definition=definition.definition(), cell_digest="x",
            prompts_sha256="x", command=[], started_at="", tool={},
        )  # fmt: skip
        (folder / "result.json").write_text(json.dumps(dataclasses.asdict(result)))
        epoch += 1000.0
    (run / "servers").mkdir()
    (run / "servers" / "sparkinfer-toy-b1-r1.steps.jsonl").write_text("\n".join(lines) + "\n")
    return run


def _shifted(record: Record, by_ns: int) -> Record:
    changes = {name: getattr(record, name) + by_ns for name in ("start_ns", "first_token_ns", "end_ns")}
    return dataclasses.replace(record, **changes, token_ns=None)


def test_a_run_with_known_costs_is_predicted(run_folder: Path) -> None:
    recorded = read_run(run_folder)
    found, seen = fit_run(recorded, ENDS)
    assert {one.cell.id for one in seen} == {"chat-c1", "chat-c32", "long_answer-c1", "long_prompt-c32"}
    assert found.host.ingest == pytest.approx(0.003, abs=1e-5)
    assert found.host.ingest_each == pytest.approx(0.0008, abs=1e-5)
    assert found.host.egress == pytest.approx(0.001, abs=1e-5)
    assert found.host.turn + found.host.think == pytest.approx(0.0025, rel=0.05)
    assert found.host.spacing == pytest.approx(0.0002, abs=1e-5)
    points = compare.predict(recorded, found, seen)
    assert {point.cell for point in points if not point.fitted} == {"chat-c4", "chat-c16", "poisson-r1"}
    assert all(abs(point.error) < 0.05 for point in points), [(p.cell, p.metric, p.error) for p in points]


def test_each_cell_is_predicted_from_the_others(run_folder: Path) -> None:
    points = compare.predict_each(read_run(run_folder))
    assert len({point.cell for point in points}) == 7
    assert not any(point.fitted for point in points)
    assert all(point.inside for point in points), [(p.cell, p.metric, p.error) for p in points]
    assert "7 of 7 cells it has not seen" in compare.verdict(points)


def test_several_runs_are_repetitions_of_the_same_cells(run_folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.symlink_to(run_folder)
    both, one = read_runs([run_folder, again]), read_run(run_folder)
    assert both.run == f"{run_folder.name}, again"
    assert len(both.cells) == 2 * len(one.cells)
    points = compare.predict(both, *fit_run(both, ENDS))
    assert len(points) == len(compare.predict(one, *fit_run(one, ENDS)))
    assert all(abs(point.error) < 0.05 for point in points)
    other = tmp_path / "other"
    shutil.copytree(run_folder, other)
    path = other / "b1" / "sparkinfer" / "toy" / "chat-c4" / "r1" / "result.json"
    document = json.loads(path.read_text())
    document["cell_definition"]["requests"] += 1
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="two cells chat-c4 of different load"):
        read_runs([run_folder, other])


def test_costs_around_the_engine_come_from_requests_that_were_alone(run_folder: Path) -> None:
    """Under load an arrival waits for the server, even where the engine paused: those do not count."""
    cells = {one.cell.id: one for one in read_run(run_folder).cells}
    assert len(lone_requests(cells["chat-c1"])) == len(cells["chat-c1"].records)
    assert lone_requests(cells["chat-c32"]) == []
    alone = lone_requests(cells["poisson-r1"])
    assert 0 < len(alone) < len(cells["poisson-r1"].records)
    for record, _, _ in alone:
        others = [r for r in cells["poisson-r1"].records if r is not record]
        assert not any(r.start_ns < record.first_token_ns and r.end_ns > record.start_ns for r in others)


def test_a_wrong_model_is_outside_the_band(run_folder: Path) -> None:
    recorded = read_run(run_folder)
    found, seen = fit_run(recorded, ENDS)
    slow = dataclasses.replace(found, pass_weights=[1.4 * weight for weight in found.pass_weights])
    points = compare.predict(recorded, slow, seen)
    # An open loop ends when its last request does, however slow the steps.
    closed = [p for p in points if p.metric == "output_tok_s" and "poisson" not in p.cell]
    assert len(closed) == 6
    assert not any(p.inside for p in closed)
    assert "(outside)" in compare.table(points)
    assert "0 of 4 cells the model was fitted on" in compare.verdict(points)


def test_command_line_on_a_run(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--run", str(run_folder), "--out", str(tmp_path / "out"), "--save", str(tmp_path / "costs.json")]
    arguments += ["--fit-cells", *ENDS]
    assert cli.main([*arguments, "--set", "mixed_chunk=0", "--set", "mixed_chunk=1024,pack_prefill=0"]) == 0
    printed = capsys.readouterr().out
    assert "| chat-c16 |" in printed
    assert "not seen" in printed
    assert "| chat-c16 | mixed_chunk=0 |" in printed
    document = json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert {"cell", "metric", "measured", "predicted", "error", "inside", "fitted"} <= set(document["points"][0])
    assert document["fitted_on"]["cells"] == ["chat-c1", "chat-c32", "long_answer-c1", "long_prompt-c32"]
    assert document["fitted_on"]["engine_digest"] == "x"
    assert shlex.join(arguments) in document["origin"]["command"]
    assert document["origin"]["command"] in (tmp_path / "out" / "simulation.md").read_text()
    assert (tmp_path / "out" / "simulation.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "out").glob(".*"))
    again = ["--costs", str(tmp_path / "costs.json"), "--cells", str(ROOT / "config" / "cells.yaml")]
    assert cli.main([*again, "--cell", "chat-c16", "poisson-r2", "--set", "mixed_chunk=0"]) == 0
    assert "| poisson-r2 | mixed_chunk=0 |" in capsys.readouterr().out
    steps = ["--steps", str(run_folder / "servers" / "sparkinfer-toy-b1-r1.steps.jsonl")]
    requests = tmp_path / "trace.jsonl"
    requests.write_text('{"prompt_tokens": 64, "output_tokens": 8, "at_s": 0.5, "prefix": "s", "prefix_tokens": 32}\n')
    assert cli.main([*steps, "--requests", str(requests)]) == 0
    assert "| trace | as recorded |" in capsys.readouterr().out


def test_a_policy_s_mixed_chunk_leaves_room_for_a_backlog_or_turns_it_off() -> None:
    base = dataclasses.replace(CONFIG, mixed_chunk=1024, backlog_chunk=4096, prefill_chunk=8192)
    for text, backlog in {"": 4096, "mixed_chunk=0": 0, "mixed_chunk=4096": 0, "mixed_chunk=512": 4096}.items():
        assert cli.policy(text, base).backlog_chunk == backlog
    assert cli.policy("mixed_chunk=2048,backlog_chunk=8192", base).backlog_chunk == 8192
    with pytest.raises(ConfigError, match="backlog_chunk is 4096 but mixed_chunk is 0"):
        cli.policy("mixed_chunk=0,backlog_chunk=4096", base)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "exactly one of"),
        (["--costs", "absent.json", "--cell", "chat-c1"], "not a cost model"),
        (["--run", "absent"], "--run absent is not a folder"),
        (["--run", "{costs}"], "costs.json is not a folder"),
        (["--costs", "{binary}", "--cell", "chat-c1"], "binary is not a cost model"),
        (["--steps", "{binary}"], "binary cannot be read"),
        (["--costs", "{costs}", "--requests", "{binary}"], "binary cannot be read"),
        (["--costs", "{costs}", "--requests", "{bad}", "--concurrency", "-1"], "--concurrency -1"),
        (["--costs", "{costs}", "--cells", "{binary}", "--cell", "chat-c1"], "binary is not YAML"),
        (["--costs", "{costs}", "--cells", "{folder}", "--cell", "chat-c1"], "cannot be read (Is a directory)"),
        (["--costs", "{costs}", "--cell", "chat-c99"], "no cell chat-c99"),
        (["--costs", "{costs}", "--cell", "chat-c1", "--set", "colour=1"], "setting of the scheduler"),
        (["--costs", "{costs}", "--cell", "chat-c1", "--set", "mixed_chunk=x"], "not a value of mixed_chunk"),
        (["--costs", "{costs}", "--cell", "chat-c1", "--set", "mixed_chunk=8"], "below a block"),
        (["--costs", "{costs}", "--cell", "chat-c1", "--set", "drafter_loaded=1"], "setting of the scheduler"),
        (["--costs", "{costs}", "--cell", "chat-c1", "--set", "max_in_flight=2"], "setting of the scheduler"),
        (["--costs", "{costs}", "--requests", "{bad}"], "trace.jsonl:1"),
    ],
)
def test_bad_input_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    save(costs(**{"pass": 0.01}), tmp_path / "costs.json")
    (tmp_path / "trace.jsonl").write_text('{"prompt": 3}\n')
    (tmp_path / "binary").write_bytes(b"\x80\xff\x00")
    names = {"{costs}": str(tmp_path / "costs.json"), "{bad}": str(tmp_path / "trace.jsonl")}
    names |= {"{binary}": str(tmp_path / "binary"), "{folder}": str(tmp_path)}
    filled = [names.get(item, item) for item in arguments]
    assert cli.main(["--cells", str(ROOT / "config" / "cells.yaml"), *filled]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [{"prompt_tokens": 1.5}, {"prompt_tokens": True}, {"output_tokens": 10**12}, {"at_s": float("inf")},
     {"at_s": float("nan")}, {"temperature": "hot"}, {"prefix": 3}, {"prefix_tokens": -1}],
)  # fmt: skip
def test_requests_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"prompt_tokens": 8, "output_tokens": 8, **change}) + "\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:1: lengths"):
        read_requests(path, 1)


def test_a_run_without_traces_is_refused(run_folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "run"
    bare.mkdir()
    (bare / "b1").symlink_to(run_folder / "b1")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(bare)


def test_passes_can_be_executed_by_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ToySize(
        hidden=32, heads=2, head_dim=16, linear_key_heads=1, linear_value_heads=2, linear_head_dim=16, ffn=32,
        vocab=512, max_positions=256,
    )  # fmt: skip
    generate("dense", tmp_path / "toy", size=size)
    config = dataclasses.replace(CONFIG, num_kv_blocks=128, max_model_len=256, max_num_seqs=8)
    model = dataclasses.replace(costs(Host(think=0.001), config), about={"dtype": "float32"})
    priced = cli.with_real_passes(tmp_path / "toy", model)
    load = Workload("x", (Shape(40, 6),) * 12, 4)
    for chunk in (0, 64):
        policy = dataclasses.replace(config, mixed_chunk=chunk)
        figures, outcome = compare.simulated(load, policy, priced, real=True)
        assert [record.output_tokens for record in outcome.records] == [6] * 12
        assert figures["output_tok_s", "value"] > 0
        assert figures["ttft_ms", "p50"] > 0
    save(model, tmp_path / "costs.json")
    (tmp_path / "trace.jsonl").write_text('{"prompt_tokens": 33, "output_tokens": 4}\n' * 3)
    arguments = ["--costs", str(tmp_path / "costs.json"), "--requests", str(tmp_path / "trace.jsonl")]
    assert cli.main([*arguments, "--concurrency", "2", "--real", str(tmp_path / "toy"), "--set", "mixed_chunk=0"]) == 0
    assert "| trace | mixed_chunk=0 |" in capsys.readouterr().out
    assert cli.main([*arguments, "--real", str(tmp_path / "absent")]) == 2
