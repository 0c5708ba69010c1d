"""RELEASE_NOTE.md: a headline, what was measured, what changed and how to turn it off, the container, the history."""

from __future__ import annotations

from sparkinfer_eval.report.document import Block, Bullets, Heading, Paragraph, to_markdown
from sparkinfer_eval.report.figures import Figures
from sparkinfer_eval.report.fragments import Fragment
from sparkinfer_eval.report.history import History
from sparkinfer_eval.report.summary import (
    container_sentence,
    footnote,
    headline_figure,
    tools,
    weights_sentence,
)
from sparkinfer_eval.report.tables import (
    arrival_cells,
    arrivals_table,
    closed_cells,
    throughput_table,
    ttft_table,
)
from sparkinfer_eval.report.text import machine_line, number, refuse_claims, split_cell


def _title(figures: Figures, fragments: list[Fragment]) -> str:
    """`v0.1.0 — <headline>`: the fragments' headline where one has it, else the run's figure."""
    lead = next((f.headline for f in fragments if f.headline), None)
    return f"v{figures.run.info['version']} — {lead or headline_figure(figures)}"


def measured(figures: Figures) -> list[Block]:
    """The seeds' two tables for every model: TTFT with throughput at chat, and all cells' throughput."""
    info = figures.run.info
    engines = "; ".join(e["label"] + (f" ({e['note']})" if e.get("note") else "") for e in figures.run.engines)
    blocks: list[Block] = [
        Heading(2, "Measured"),
        Paragraph(
            f"{tools(figures)}, streaming chat completions, {machine_line(info['machine'])}. {engines}; "
            f"measured in one run on one machine. {info['scale']['statement']} {weights_sentence(figures)}".strip()
        ),
    ]
    for model in figures.models():
        cells = closed_cells(figures, model)
        chats = [c for c in cells if split_cell(c)[0] == "chat"]
        blocks.append(Heading(3, figures.model_title(model)))
        if chats:
            blocks += [ttft_table(figures, model, chats), Bullets([_per_token(figures, model, chats)])]
        if cells:
            blocks += [throughput_table(figures, model)]
        if arrival_cells(figures):
            blocks += [Paragraph("Poisson arrivals (`eval/spec_open_arrivals.py`):"), arrivals_table(figures, model)]
    blocks += footnote(blocks)
    if figures.run.missing:
        blocks.append(
            Paragraph(f"Missing measurements: {len(figures.run.missing)}; CHANGELOG.md names each with its reason.")
        )
    return blocks


def _per_token(figures: Figures, model: str, cells: list[str]) -> str:
    """`Per-token latency (ITL p50, ms) at 16 / 32 chats: 0.1.0 17.8 / 22.3; vLLM 0.30.0 19.8 / 29.2`."""
    levels = " / ".join(f"{split_cell(cell)[1]:g}" for cell in cells)
    parts = []
    for engine in figures.run.engines:
        values = (figures.value(engine["name"], model, cell, "itl_ms", "p50") for cell in cells)
        parts.append(f"{engine['label']} {' / '.join(number(value) for value in values)}")
    return f"Per-token latency (ITL p50, ms) at {levels} chats: {'; '.join(parts)}."


def checks_sentence(figures: Figures) -> Paragraph:
    """One sentence per check and model; the table is in CHANGELOG.md."""
    words = {True: "passed", False: "FAILED"}
    parts = []
    for check in figures.run.checks:
        verdict = "no output" if check.data is None else words.get(check.ok, "not applicable")  # type: ignore[arg-type]
        parts.append(f"`{check.check}` on {figures.model_label(check.model)}: {verdict}")
    return Paragraph("Correctness checks: " + ("; ".join(parts) or "none was part of this run") + ".")


def _history(figures: Figures, history: History) -> list[Block]:
    """The merged changes since the last tag, and the range."""
    version = figures.run.info["version"]
    blocks: list[Block] = [Heading(2, "What's Changed")]
    if history.reason:
        return [*blocks, Paragraph(f"The list of merged changes is not available: {history.reason}.")]
    if history.changes:
        blocks.append(Bullets([change.line() for change in history.changes]))
    else:
        blocks.append(Paragraph("No change was merged since the last release."))
    span = f"{history.previous_tag}...v{version}" if history.previous_tag else f"v{version} (first release)"
    return [*blocks, Paragraph(f"**Full Changelog**: {span}")]


def release_note(figures: Figures, fragments: list[Fragment], history: History) -> str:
    """The whole note as Markdown. Raises ConfigError when a fragment claims what no verdict supports."""
    refuse_claims([f.sentence() for f in fragments] + [f.headline or "" for f in fragments], "changes/")
    blocks: list[Block] = [
        Heading(1, _title(figures, fragments)),
        Paragraph(f"In figures: {headline_figure(figures)}."),
        *measured(figures),
        checks_sentence(figures),
        Heading(2, "What changed"),
        Bullets([f.sentence() for f in fragments])
        if fragments
        else Paragraph("No change fragment was written for this version."),
        Paragraph("Full notes: CHANGELOG.md."),
        Paragraph(container_sentence(figures.run.info)),
        *_history(figures, history),
    ]
    return to_markdown(blocks)
