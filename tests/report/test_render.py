"""The report folder as a whole: every file, from realistic raw results."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from sparkinfer_containers.verify.numbers import differences
from sparkinfer_eval import parquet
from sparkinfer_eval.records import Record
from sparkinfer_eval.report.failures import record_failure
from sparkinfer_eval.report.run_info import validate
from sparkinfer_eval.report.writer import write_report

from sparkinfer.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def render(tmp_path: Path, changes: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Render a raw run; returns the report folder. Plots take most of the time: only tests of them draw any."""

    def run(raw, name: str = "reports", plots: bool = False) -> Path:
        if not plots:
            monkeypatch.setattr("sparkinfer_eval.report.writer.draw_all", lambda figures: {})
        output = tmp_path / name / raw.folder.name
        write_report(raw.folder, output, tmp_path, changes)
        return output

    return run


def row_of(text: str, start: str) -> list[str]:
    """The cells of the first Markdown table row that begins with `start`."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_file_is_there_and_nothing_else(raw_run, render):
    report = render(raw_run(), plots=True)
    assert sorted(p.name for p in report.iterdir()) == [
        "CHANGELOG.md", "RELEASE_NOTE.md", "commands.txt", "plots", "report.html", "report.json", "requests.parquet",
    ]  # fmt: skip
    stems = {p.stem for p in (report / "plots").iterdir()}
    kinds = ("ttft", "throughput-latency", "cells", "itl", "arrivals", "ratio")
    assert stems == {f"{kind}-spark-tiny-dense" for kind in kinds}
    for stem in stems:
        assert (report / "plots" / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(report / "plots" / f"{stem}.svg")
    assert [p.name for p in report.parent.iterdir()] == [report.name], "a temporary folder was left"


def test_first_lines_state_scale_weights_machine_and_versions(raw_run, render):
    head = (render(raw_run()) / "CHANGELOG.md").read_text().split("## spark-tiny-dense")[0]
    for expected in (
        "AIPerf 0.13.0",
        "0.1.0-cpu-0a1b2c3d", "CPU-scale run: lengths divided by 8", "Random weights: spark-tiny-dense", "Test CPU",
        "vLLM 0.30.0", "torch 2.13.0+cpu", "2026-12-01T10:01:01+00:00", "commands.txt", "not the shipped image",
    ):  # fmt: skip
        assert expected in head


def test_table_values_equal_a_computation_by_hand(raw_run, render):
    raw = raw_run()
    report = render(raw)
    lines = (raw.place("sparkinfer", "chat-c16") / "records.jsonl").read_text().splitlines()
    records = [r for r in map(json.loads, lines) if r["phase"] == "profiling"]
    ttft = sorted((r["first_token_ns"] - r["start_ns"]) / 1e6 for r in records)
    span = (max(r["end_ns"] for r in records) - min(r["start_ns"] for r in records)) / 1e9
    rate = sum(r["output_tokens"] for r in records) / span
    middle = (ttft[34] + ttft[35]) / 2
    row = row_of((report / "CHANGELOG.md").read_text(), "16 chats: sparkinfer 0.1.0")
    assert row[1].split(" / ")[0] == f"{middle:.1f}"
    assert row[2] == f"{rate:,.0f}"
    assert row[3] == "70"
    text = (report / "report.json").read_text()
    data = json.loads(text)
    assert len(text) < 0.9 * len(json.dumps(data, indent=1)), "a line for each row"
    key = {"model": "spark-tiny-dense", "cell": "chat-c16", "engine": "sparkinfer", "rep": 1}
    found = {(c["metric"], c["stat"]): c for c in data["cells"] if key.items() <= c.items()}
    assert found["ttft_ms", "p50"]["value"] == pytest.approx(middle)
    assert found["output_tok_s", "value"]["value"] == pytest.approx(rate)
    assert found["output_tok_s", "value"]["n"] == 70
    assert data["cell_definitions"]["poisson-r1"]["rate"] == 4.0
    assert [s["info"]["settings"]["max_num_seqs"] for s in data["servers"]] == [32, 32]


def test_changing_one_raw_number_changes_the_tables(raw_run, render):
    raw = raw_run()
    before = (render(raw) / "CHANGELOG.md").read_text()

    def later(record: Record) -> Record:
        if record.request_id != "chat-c1-7":
            return record
        return dataclasses.replace(record, first_token_ns=record.first_token_ns + 5_000_000_000,
                                   end_ns=record.end_ns + 5_000_000_000)  # fmt: skip

    raw.edit_records("sparkinfer", "chat-c1", later)
    after = (render(raw) / "CHANGELOG.md").read_text()
    name = "1 chat: sparkinfer 0.1.0"
    assert row_of(before, name) != row_of(after, name)
    assert row_of(before, "1 chat: vLLM 0.30.0") == row_of(after, "1 chat: vLLM 0.30.0")
    assert row_of(before, "chat, 1 request")[2] == row_of(after, "chat, 1 request")[2]
    assert row_of(before, "chat, 1 request")[1] != row_of(after, "chat, 1 request")[1]


def test_rendering_twice_gives_the_same_bytes(raw_run, render):
    raw = raw_run(engines=["sparkinfer", "vllm", "previous"])
    first, second = render(raw, "a", plots=True), render(raw, "b", plots=True)
    names = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_previous_engine_gives_arrows_and_a_column(raw_run, render):
    text = (render(raw_run(engines=["sparkinfer", "vllm", "previous"])) / "CHANGELOG.md").read_text()
    row = row_of(text, "16 chats: 0.0.9 → 0.1.0")
    assert row[1].count("→") == 1
    assert row[2].count("→") == 1
    assert "| output tok/s | 0.0.9 | 0.1.0 | vLLM 0.30.0 |" in text


def test_without_previous_there_is_no_such_column(raw_run, render):
    text = (render(raw_run()) / "CHANGELOG.md").read_text()
    assert "→" not in text
    assert "| output tok/s | 0.1.0 | vLLM 0.30.0 |" in text


def test_percentiles_with_too_few_requests_are_marked(raw_run, render):
    text = (render(raw_run(counts={"chat-c16": 64, "chat-c1": 63})) / "CHANGELOG.md").read_text()
    p50, p90, p99 = row_of(text, "16 chats: sparkinfer 0.1.0")[1].split(" / ")
    assert not p50.endswith("†")
    assert not p90.endswith("†")
    assert p99.endswith("†")
    assert row_of(text, "1 chat: sparkinfer 0.1.0")[1].split(" / ")[1].endswith("†")
    assert "p90/p95/p99 need 64/130/662 requests" in text


def test_a_cell_of_one_request_renders(raw_run, render):
    report = render(raw_run(counts={"chat-c1": 1, "chat-c16": 1, "long_answer-c4": 1, "poisson-r1": 1}), plots=True)
    assert row_of((report / "CHANGELOG.md").read_text(), "1 chat: sparkinfer 0.1.0")[3] == "1"


def test_missing_cell_is_listed_with_its_reason(raw_run, render):
    raw = raw_run(skip={("vllm", "chat-c16")})
    place = {"block": 1, "engine": "vllm", "model": "spark-tiny-dense", "cell": "chat-c16", "rep": 1}
    record_failure(raw.folder, **place, reason="the server exited with code 137 | out of memory")
    record_failure(raw.folder, **place | {"engine": "sparkinfer"}, reason="port in use, tried again")
    report = render(raw)
    text = (report / "CHANGELOG.md").read_text()
    assert row_of(text, "16 chats: vLLM 0.30.0")[1:3] == ["missing", "missing"]
    assert "the server exited with code 137 \\| out of memory" in text
    assert "port in use, tried again" in text
    data = json.loads((report / "report.json").read_text())
    reason = "the server exited with code 137 | out of memory"
    assert [(x["engine"], x["cell"], x["reason"]) for x in data["missing"]] == [("vllm", "chat-c16", reason)]
    assert "Missing measurements: 1" in (report / "RELEASE_NOTE.md").read_text()


def test_engine_without_any_result_is_missing_everywhere(raw_run, render):
    cells = ["chat-c1", "chat-c16", "long_answer-c4", "poisson-r1"]
    report = render(raw_run(skip={("vllm", cell) for cell in cells}), plots=True)
    assert len(json.loads((report / "report.json").read_text())["missing"]) == 4
    text = (report / "CHANGELOG.md").read_text()
    assert row_of(text, "chat, 1 request")[2] == "missing"


def test_run_without_baseline_says_so_and_has_no_ratio(raw_run, render):
    report = render(raw_run(engines=["sparkinfer"]))
    text = (report / "CHANGELOG.md").read_text()
    assert "This run has no baseline" in text
    assert "Ratio to the baseline" not in text
    assert json.loads((report / "report.json").read_text())["ratios"] == []


def test_failed_and_missing_checks_are_named(raw_run, render):
    raw = raw_run(models=["spark-tiny-dense", "spark-tiny-moe"])
    raw.write_check("spark-tiny-dense", ok=False)
    (raw.folder / "checks" / "pack_ckpt_check-spark-tiny-moe.json").unlink()
    report = render(raw)
    text = (report / "CHANGELOG.md").read_text()
    assert "FAILED: pack_ckpt_check on spark-tiny-dense." in text
    assert "Missing: pack_ckpt_check on spark-tiny-moe" in text
    assert "`pack_ckpt_check` on spark-tiny-dense: FAILED" in (report / "RELEASE_NOTE.md").read_text()


def test_a_check_that_does_not_apply_is_listed_with_its_reason(raw_run, render):
    raw = raw_run()
    path = raw.folder / "checks" / "pack_ckpt_check-spark-tiny-dense.json"
    data = json.loads(path.read_text())
    data |= {"rows": [], "ok": None, "not_applicable": "the model has no recurrent state"}
    path.write_text(json.dumps(data))
    text = (render(raw) / "CHANGELOG.md").read_text()
    assert "the model has no recurrent state | – | – | not applicable" in text


def test_answers_that_arrived_at_one_instant_are_marked(raw_run, render):
    raw = raw_run()
    cell = raw.info["cells"][0]
    before = (render(raw) / "CHANGELOG.md").read_text()
    raw.edit_records("vllm", cell, lambda r: dataclasses.replace(r, first_token_ns=r.end_ns, token_ns=None))
    after = (render(raw) / "CHANGELOG.md").read_text()
    assert "‡" not in before
    assert "‡ in this cell all tokens of at least one answer arrived at one instant" in after
    (row,) = [line for line in after.splitlines() if "vLLM" in line and "‡" in line and "|" in line]
    assert "sparkinfer" not in row


@pytest.mark.parametrize("bad", [(), (3, 17)])
def test_a_long_check_shows_its_failed_rows_or_the_nearest_to_the_limit(raw_run, render, bad):
    raw = raw_run()
    path = raw.folder / "checks" / "pack_ckpt_check-spark-tiny-dense.json"
    data = json.loads(path.read_text())
    data["rows"] = [{"name": f"layer {i}", "value": i / 1000, "limit": 0.05, "ok": i not in bad} for i in range(40)]
    data["ok"] = not bad
    path.write_text(json.dumps(data))
    report = render(raw)
    text = (report / "CHANGELOG.md").read_text()
    shown = re.findall(r"\| (layer \d+) \|", text)
    assert shown == ([f"layer {i}" for i in bad] or ["layer 39"])
    assert "all rows (40)" in text
    assert len(json.loads((report / "report.json").read_text())["checks"][0]["output"]["rows"]) == 40


def test_several_blocks_and_reps_are_pooled(raw_run, render):
    raw = raw_run(blocks=2, reps=2, cells=["chat-c16"], counts={"chat-c16": 20})
    report = render(raw)
    data = json.loads((report / "report.json").read_text())
    rates = [c["value"] for c in data["cells"] if c["engine"] == "vllm" and c["metric"] == "output_tok_s"]
    pooled = next(s for s in data["summary"] if s["engine"] == "vllm" and s["metric"] == "output_tok_s")
    assert len(rates) == 4
    assert pooled["value"] == pytest.approx(sum(rates) / 4)
    assert pooled["runs"] == 4
    assert row_of((report / "CHANGELOG.md").read_text(), "16 chats: vLLM 0.30.0")[3] == "80"


def test_report_json_fits_its_schema_and_a_wrong_one_is_refused(raw_run, render):
    data = json.loads((render(raw_run()) / "report.json").read_text())
    validate(data, "report-v1", "report.json")
    required = {"model", "cell", "engine", "rep", "metric", "stat", "value", "unit", "n"}
    assert all(required <= set(cell) for cell in data["cells"])
    data["cells"][0]["metric"] = "ttft_s"
    with pytest.raises(ConfigError, match="cells/0/metric"):
        validate(data, "report-v1", "report.json")


def test_requests_table_holds_every_record(raw_run, render):
    report = render(raw_run())
    table = parquet.read(report / "requests.parquet")
    assert table.num_rows == 2 * (9 + 71 + 9 + 9)
    assert set(table.column("phase").to_pylist()) == {"warmup", "profiling"}


class Page(html.parser.HTMLParser):
    """Collects ids, references and tags, and checks that every non-void element is closed in order."""

    VOID = frozenset({"meta", "br", "img", "hr", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "action", "data") and value:
                self.links.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_well_formed_and_needs_nothing_from_elsewhere(raw_run, render):
    text = (render(raw_run(label="modèle <№1> & x"), plots=True) / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.tags.count("svg") == 6
    assert len(set(page.ids)) == len(page.ids), "ids of several plots collide"
    assert all(link.startswith("#") and link[1:] in set(page.ids) for link in page.links)
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text
    assert {"script", "iframe", "img", "link"}.isdisjoint(page.tags)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert "modèle &lt;№1&gt; &amp; x" in text


def test_unicode_and_pipes_keep_the_tables_whole(raw_run, render):
    text = (render(raw_run(label="modèle | 模型")) / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "modèle | 模型 (random weights)" in text
    for line in text.splitlines():
        if line.startswith("| pack_ckpt_check"):
            assert len(re.split(r"(?<!\\)\|", line)) == 8


def test_optional_fields_of_run_json_may_be_absent(raw_run, render):
    raw = raw_run()
    path = raw.folder / "run.json"
    info = json.loads(path.read_text())
    for field in ("commands", "container"):
        del info[field]
    for field in ("dtype", "parameters"):
        del info["models"][0][field]
    for engine in info["engines"]:
        del engine["environment"]
    info["machine"] = {}
    path.write_text(json.dumps(info))
    text = (render(raw) / "CHANGELOG.md").read_text()
    assert "Models: spark-tiny-dense (random weights, `sha256:" in text
    assert "not the shipped image" in text


def test_trained_models_are_not_called_random(raw_run, render):
    report = render(raw_run(random_weights=False))
    for name in ("CHANGELOG.md", "RELEASE_NOTE.md", "report.html"):
        assert "andom weights" not in (report / name).read_text()


def test_commands_hold_no_path_of_this_machine(raw_run, tmp_path, changes, monkeypatch):
    raw = raw_run()
    place = raw.place("sparkinfer", "chat-c1")
    (place / "command.txt").write_text(f"{tmp_path}/.venvs/aiperf/bin/aiperf profile --out {Path.home()}/x\n")
    output = tmp_path / "out"
    monkeypatch.setattr("sparkinfer_eval.report.writer.draw_all", lambda figures: {})
    write_report(raw.folder, output, tmp_path, changes)
    text = (output / "commands.txt").read_text()
    assert "./.venvs/aiperf/bin/aiperf profile --out ~/x" in text
    assert "OMP_NUM_THREADS=2 python -m vllm --port 0" in text
    assert str(tmp_path) not in text
    for name in ("report.html", "CHANGELOG.md", "report.json"):
        assert str(tmp_path) not in (output / name).read_text()


@pytest.mark.parametrize(
    ("container", "line"),
    [
        (None, "the source tree, not the shipped image."),
        ({"measured": False, "reason": "no sandbox here"}, "not the shipped image: no sandbox here."),
        ({"reference": "example.org/s:0.1.0", "digest": "sha256:" + "a" * 64, "measured": False},
         "from the source tree, not the shipped image"),
        ({"reference": "example.org/s:0.1.0", "digest": "sha256:" + "a" * 64, "measured": True, "attested": True},
         "attested)."),
        ({"reference": "example.org/s:0.1.0", "digest": "sha256:" + "a" * 64, "measured": True, "attested": True,
          "source_digest": "sha256:" + "b" * 64}, "from the source tree, `sha256:" + "b" * 64 + "`."),
    ],
)  # fmt: skip
def test_container_line(raw_run, render, container, line):
    report = render(raw_run(container=container))
    for name in ("CHANGELOG.md", "RELEASE_NOTE.md"):
        assert line in (report / name).read_text()


def test_signed_report_is_not_overwritten(raw_run, render):
    raw = raw_run()
    report = render(raw)
    (report / "bundles").mkdir()
    (report / "bundles" / "evaluation.json").write_text("{}")
    before = (report / "report.json").read_bytes()
    with pytest.raises(ConfigError, match="signed"):
        render(raw)
    assert (report / "report.json").read_bytes() == before


def test_failure_while_rendering_leaves_the_old_report(raw_run, render, monkeypatch):
    raw = raw_run()
    report = render(raw)
    before = {p.name: p.read_bytes() for p in report.iterdir() if p.is_file()}
    monkeypatch.setattr(
        "sparkinfer_eval.report.writer.parquet.write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(OSError, match="No space left"):
        render(raw)
    assert {p.name: p.read_bytes() for p in report.iterdir() if p.is_file()} == before
    assert [p.name for p in report.parent.iterdir()] == [report.name]


def test_command_line_returns_2_and_names_the_file(raw_run, tmp_path):
    raw = raw_run()
    (raw.place("vllm", "chat-c1") / "result.json").write_text('{"schema": "sparkinfer/raw')
    done = subprocess.run(
        [sys.executable, REPOSITORY / "eval" / "render_report.py", raw.folder, "--output", tmp_path / "out"],
        capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'eval'}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "chat-c1" in done.stderr
    assert "result.json is corrupt" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_documented_check_by_hand_gives_the_reported_numbers(raw_run, render):
    report = render(raw_run())
    page = (REPOSITORY / "docs" / "report.md").read_text()
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0].replace("reports/<run>", str(report))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ttft, rate = (float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines())
    row = row_of((report / "CHANGELOG.md").read_text(), "16 chats: sparkinfer 0.1.0")
    assert row[1].split(" / ")[0] == f"{ttft:.1f}"
    assert row[2] == f"{rate:,.0f}"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"engines": ["sparkinfer", "vllm", "previous"], "blocks": 2, "reps": 2, "counts": {}},
        {"skip": {("vllm", "chat-c16"), ("sparkinfer", "poisson-r1")}},
        {"engines": ["sparkinfer"], "models": ["spark-tiny-dense", "spark-tiny-moe"]},
    ],
    ids=["plain", "previous-blocks-reps", "missing", "two-models-no-baseline"],
)
def test_the_verifier_derives_the_same_report_from_the_records(raw_run, render, settings):
    report = render(raw_run(**settings))
    assert differences(report, json.loads((report / "report.json").read_text())) == []


def test_the_verifier_names_a_number_changed_by_hand(raw_run, render):
    report = render(raw_run())
    data = json.loads((report / "report.json").read_text())
    text = (report / "CHANGELOG.md").read_text()
    rate = row_of(text, "16 chats: sparkinfer 0.1.0")[2]
    (report / "CHANGELOG.md").write_text(text.replace(f"| {rate} |", "| 9,999 |", 1))
    assert any("16 chats: sparkinfer 0.1.0" in line for line in differences(report, data))
