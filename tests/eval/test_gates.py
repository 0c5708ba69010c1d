"""Each validity gate passes a sound AIPerf export and names the fault of a planted one."""

from __future__ import annotations

import copy
import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sparkinfer_eval import gates
from sparkinfer_eval.aiperf import Load, aiperf_gates
from sparkinfer_eval.aiperf_export import ending, read_export
from sparkinfer_eval.cells import Cell
from sparkinfer_eval.prompts import PromptSet

BEGIN = 1_790_000_000_000_000_000
MS = 1_000_000
URL = "http://127.0.0.1:9"
JSON = dict[str, Any]


def stats(values: list[float]) -> JSON:
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"unit": "ms", "avg": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99}


def plant(folder: Path, cell: Cell, prompts: PromptSet) -> tuple[list[JSON], list[JSON], JSON]:
    """A sound export of the cell in AIPerf 0.13's form: (records, raw records, summary)."""
    records, raws = [], []
    tokens = cell.output_tokens or 0
    for index, row in enumerate(prompts.rows):
        ttft, gap = 20.0 + index, 2.0 + 0.01 * index
        start = BEGIN + index * 40 * MS
        meta = {
            "conversation_id": row["session_id"],
            "benchmark_phase": row["phase"],
            "credit_issued_ns": start - MS,
            "request_start_ns": start,
            "request_end_ns": start + 10_000 * MS,
            "was_cancelled": False,
        }
        values = {
            "time_to_first_token": ttft,
            "request_latency": ttft + gap * (tokens - 1),
            "inter_token_latency": gap,
            "inter_chunk_latency": [gap] * (tokens - 1),
            "usage_prompt_tokens": cell.prompt_tokens,
            "usage_completion_tokens": tokens,
        }
        records.append({"metadata": meta, "metrics": {name: {"value": value} for name, value in values.items()}})
        chunks = [{"choices": [{"delta": {"content": "x"}, "finish_reason": None}]}] * (tokens - 1)
        chunks = [*chunks, {"choices": [{"delta": {"content": "x"}, "finish_reason": "length"}]}, {"choices": []}]
        packets = [{"name": "data", "value": json.dumps(chunk)} for chunk in chunks]
        packets.append({"name": "data", "value": "[DONE]"})
        raws.append(
            {
                "metadata": meta,
                "payload": {"messages": [{"role": "user", "content": row["text"]}]},
                "responses": [{"perf_ns": 0, "packets": [packet]} for packet in packets],
            }
        )
    measured = [r for r in records if r["metadata"]["benchmark_phase"] == "profiling"]
    series = {
        name: [r["metrics"][name]["value"] for r in measured]
        for name in ("time_to_first_token", "request_latency", "inter_token_latency")
    }
    first = min(r["metadata"]["request_start_ns"] for r in measured)
    last = max(r["metadata"]["request_start_ns"] + r["metrics"]["request_latency"]["value"] * MS for r in measured)
    # AIPerf's window for rates: 3 ms before the first start to 4 ms after the last content.
    begin, end = (dt.datetime.fromtimestamp(ns / 1e9, dt.UTC) for ns in (first - 3 * MS, last + 4 * MS))
    seconds = (end - begin).total_seconds()
    summary = {
        "aiperf_version": "0.13.0",
        "is_complete": True,
        "was_cancelled": False,
        "error_summary": [],
        "run_info": {"random_seed": 3, "cli_command": f"aiperf profile --url '{URL}'"},
        "start_time": begin.isoformat(),
        "end_time": end.isoformat(),
        "benchmark_duration": {"avg": (last - first) / 1e9},
        "request_count": {"avg": float(len(measured))},
        "request_throughput": {"avg": len(measured) / seconds},
        "output_token_throughput": {"avg": len(measured) * tokens / seconds},
        "credit_to_start_latency": {"avg": 1.0},
        **{name: stats(values) for name, values in series.items()},
    }
    return records, raws, summary


def write(folder: Path, records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    (folder / "profile_export.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "profile_export_raw.jsonl").write_text("".join(json.dumps(r) + "\n" for r in raws))
    (folder / "profile_export_aiperf.json").write_text(json.dumps(summary))


def judge(folder: Path, cell: Cell, prompts: PromptSet, begin: int = BEGIN - 1) -> list[gates.Gate]:
    export = read_export(folder, prompts)
    load = Load(URL, "toy", folder, cell, prompts, 3, folder)
    return [
        *gates.common(cell, prompts, export.records, begin, BEGIN + 60_000 * MS),
        *aiperf_gates(export, load),
    ]


@pytest.fixture
def planted(tmp_path: Path, small_cell: Cell, small_prompts: dict[str, PromptSet]) -> tuple[Path, Cell, PromptSet]:
    return tmp_path, small_cell, small_prompts["chat-c4"]


def test_sound_export_passes_every_gate(planted: tuple[Path, Cell, PromptSet]) -> None:
    folder, cell, prompts = planted
    write(folder, *plant(folder, cell, prompts))
    found = judge(folder, cell, prompts)
    assert [gate for gate in found if not gate.ok] == []
    assert {gate.name for gate in found} == {
        "request_count", "errors", "prompts_sent", "disjoint_prompts", "output_lengths", "finish_reasons",
        "prompt_tokens", "times", "export", "start_delay_share", "summary_agreement",
    }  # fmt: skip
    checks = gates.require(found, "cell")
    assert all(set(check) == {"name", "value", "limit", "ok"} for check in checks)
    record = read_export(folder, prompts).records[5]
    assert record.request_id == prompts.rows[5]["session_id"]
    assert record.prompt_sha256 == prompts.rows[5]["sha256"]
    assert record.first_token_ns == record.start_ns + 25 * MS
    assert record.token_ns is not None
    assert len(record.token_ns) == record.output_tokens == cell.output_tokens
    assert (record.token_ns[0], record.token_ns[-1]) == (record.first_token_ns, record.end_ns)
    assert record.finish_reason == "length"


def _drop_one(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    del records[9], raws[9]


def _repeat_one(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    records[9]["metadata"] = records[8]["metadata"]


def _short(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    records[6]["metrics"]["usage_completion_tokens"]["value"] -= 1


def _no_usage(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    del records[6]["metrics"]["usage_prompt_tokens"], records[6]["metrics"]["usage_completion_tokens"]


def _stop(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    packet = raws[7]["responses"][-3]["packets"][0]
    packet["value"] = packet["value"].replace("length", "stop")


def _no_finish(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    del raws[7]["responses"][-3]


def _tokenizer(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    for record in records:
        record["metrics"]["usage_prompt_tokens"]["value"] += 9


def _failed(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    records[8] = {"metadata": records[8]["metadata"], "metrics": {}, "error": {"code": 500, "message": "boom"}}


def _warm_failed(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    records[0] = {"metadata": records[0]["metadata"], "metrics": {}, "error": {"code": 500, "message": "boom"}}


def _no_content(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    for name in ("time_to_first_token", "request_latency", "inter_chunk_latency", "inter_token_latency"):
        del records[8]["metrics"][name]


def _error_event(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    value = json.dumps({"error": {"message": "out of memory"}})
    raws[8]["responses"][4:] = [{"packets": [{"name": "data", "value": value}]}]


def _no_window(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    del summary["start_time"]


def _other_prompt(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    raws[8]["payload"]["messages"][0]["content"] += " again"


def _warm_prompt(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    raws[8]["payload"] = raws[0]["payload"]


def _incomplete(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    summary["is_complete"] = False


def _cancelled(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    summary["was_cancelled"] = True


def _errors_listed(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    summary["error_summary"] = [{"count": 1, "error": "x"}]


def _other_seed(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    summary["run_info"]["random_seed"] = 4


def _other_server(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    summary["run_info"]["cli_command"] = "aiperf profile --url http://elsewhere"


def _late(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    summary["credit_to_start_latency"]["avg"] = 5000.0


def _no_delay(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    del summary["credit_to_start_latency"]


def _wrong_throughput(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    summary["output_token_throughput"]["avg"] *= 1.05


def _wrong_p90(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    summary["time_to_first_token"]["p90"] += 0.1


def _no_p99(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    del summary["request_latency"]["p99"]


def _faster_records(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    for record in records:
        record["metrics"]["time_to_first_token"]["value"] *= 0.9


def _negative(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    records[8]["metrics"]["time_to_first_token"]["value"] = 9e9


def _no_raw(records: list[JSON], raws: list[JSON], summary: JSON) -> None:
    del raws[8]


PLANTED: list[tuple[Callable[[list[JSON], list[JSON], JSON], None], str, str]] = [
    (_drop_one, "request_count", "11 profiling requests instead of 12"),
    (_repeat_one, "request_count", "sent twice"),
    (_short, "output_lengths", "15 instead of 16"),
    (_no_usage, "output_lengths", "None instead of 16"),
    (_no_usage, "prompt_tokens", "None instead of"),
    (_stop, "finish_reasons", "'stop'"),
    (_no_finish, "finish_reasons", "None"),
    (_tokenizer, "prompt_tokens", "another tokenizer"),
    (_failed, "errors", "boom"),
    (_warm_failed, "errors", "boom"),
    (_error_event, "errors", "out of memory"),
    (_no_window, "summary_agreement", "lacks every figure"),
    (_no_content, "errors", "no content"),
    (_other_prompt, "prompts_sent", "did not send the prompt"),
    (_warm_prompt, "disjoint_prompts", "was in warm-up"),
    (_incomplete, "export", "incomplete"),
    (_cancelled, "export", "cancelled"),
    (_errors_listed, "export", "lists errors"),
    (_other_seed, "export", "stale"),
    (_other_server, "export", "stale"),
    (_late, "start_delay_share", "lost in the load generator"),
    (_no_delay, "start_delay_share", "not known"),
    (_wrong_throughput, "summary_agreement", "output_tok_s"),
    (_wrong_p90, "summary_agreement", "ttft_ms/p90"),
    (_no_p99, "summary_agreement", "lacks request_latency_ms/p99"),
    (_faster_records, "summary_agreement", "damaged or stale"),
    (_negative, "times", "out of order"),
    (_no_raw, "export", "1 requests have no raw record"),
]


@pytest.mark.parametrize(("fault", "gate", "reason"), PLANTED, ids=lambda value: getattr(value, "__name__", None))
def test_planted_fault_fails_its_gate(
    planted: tuple[Path, Cell, PromptSet], fault: Callable[..., None], gate: str, reason: str
) -> None:
    folder, cell, prompts = planted
    sound = plant(folder, cell, prompts)
    export = copy.deepcopy(sound)
    fault(*export)
    write(folder, *export)
    found = {item.name: item for item in judge(folder, cell, prompts)}
    assert not found[gate].ok
    assert reason in found[gate].reason
    with pytest.raises(gates.InvalidRun, match=f"{gate}: "):
        gates.require(found.values(), "cell")


def test_export_of_an_earlier_run_is_stale(planted: tuple[Path, Cell, PromptSet]) -> None:
    folder, cell, prompts = planted
    write(folder, *plant(folder, cell, prompts))
    found = {gate.name: gate for gate in judge(folder, cell, prompts, begin=BEGIN + 100 * MS)}
    assert "stale" in found["times"].reason


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("profile_export_aiperf.json", None, "wrote no profile_export_aiperf.json"),
        ("profile_export_aiperf.json", '{"is_complete": tr', "damaged"),
        ("profile_export_aiperf.json", "[]", "damaged"),
        ("profile_export.jsonl", None, "wrote no profile_export.jsonl"),
        ("profile_export.jsonl", "", "exported no request"),
        ("profile_export.jsonl", '{"metadata": {}}\n', "damaged or of another version"),
        ("profile_export.jsonl", '{"metadata"', "damaged"),
        ("profile_export.jsonl", "[1]\n", "not an object"),
        ("profile_export_raw.jsonl", None, "wrote no profile_export_raw.jsonl"),
    ],
)
def test_damaged_export_is_refused(
    planted: tuple[Path, Cell, PromptSet], name: str, content: str | None, message: str
) -> None:
    folder, cell, prompts = planted
    write(folder, *plant(folder, cell, prompts))
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(gates.InvalidRun, match=message):
        read_export(folder, prompts)


def test_prompt_in_parts_is_refused(planted: tuple[Path, Cell, PromptSet]) -> None:
    folder, cell, prompts = planted
    records, raws, summary = plant(folder, cell, prompts)
    raws[0]["payload"]["messages"][0]["content"] = [{"type": "text", "text": "x"}]
    write(folder, records, raws, summary)
    with pytest.raises(gates.InvalidRun, match="in parts"):
        read_export(folder, prompts)


def test_ending_is_the_last_reason_and_the_first_error() -> None:
    def packet(value: JSON) -> JSON:
        return {"packets": [{"name": "data", "value": json.dumps(value)}]}

    reasons = [packet({"choices": [{"finish_reason": reason}]}) for reason in (None, "length", None)]
    assert ending({"responses": reasons}) == ("length", None)
    assert ending({"responses": []}) == (None, None)
    event = packet({"error": {"message": "out of memory"}})
    assert ending({"responses": [reasons[0], event]}) == (None, "out of memory")
    assert ending({"responses": [packet({"choices": [{"finish_reason": None}], "error": None})]}) == (None, None)


def test_prefix_cache_gate(planted: tuple[Path, Cell, PromptSet]) -> None:
    folder, cell, prompts = planted
    write(folder, *plant(folder, cell, prompts))
    records = read_export(folder, prompts).records
    sent = cell.prompt_tokens * len(records)
    assert gates.prefix_cache(100.0, 100.0, records, 0.01).ok
    assert gates.prefix_cache(0.0, sent * 0.009, records, 0.01).ok
    assert not gates.prefix_cache(0.0, sent * 0.011, records, 0.01).ok
    assert "no prefix-cache" in gates.prefix_cache(None, 1.0, records, 0.01).reason
    assert "restarted" in gates.prefix_cache(5.0, 1.0, records, 0.01).reason
