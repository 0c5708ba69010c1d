"""From `results/<run>` to `reports/<run>`: everything is made in a temporary folder and appears by rename."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sparkinfer.errors import ConfigError
from sparkinfer.output import require_folder
from sparkinfer_eval import parquet
from sparkinfer_eval.report.commands import commands_text, relative_paths
from sparkinfer_eval.report.document import embeddable_svg, to_html, to_markdown
from sparkinfer_eval.report.figures import Figures
from sparkinfer_eval.report.fragments import fragments_of
from sparkinfer_eval.report.history import read_history
from sparkinfer_eval.report.load import RunData, load_run
from sparkinfer_eval.report.plots import draw_all
from sparkinfer_eval.report.release_note import release_note
from sparkinfer_eval.report.report_json import build_report
from sparkinfer_eval.report.summary import changelog_blocks, page_blocks
from sparkinfer_eval.rows_json import rows_json


def _write_all(run: RunData, folder: Path, repository: Path, changes: Path) -> None:
    """Write every file of the report into an empty folder."""
    figures = Figures(run)
    commands = commands_text(run, repository)
    texts = {
        "CHANGELOG.md": to_markdown(changelog_blocks(figures)),
        "RELEASE_NOTE.md": release_note(
            figures,
            fragments_of(changes, run.info["version"]),
            read_history(repository, run.info["source"]["commit"], run.info["version"]),
        ),
        "report.json": rows_json(build_report(figures), sort_keys=True),
        "commands.txt": commands,
    }
    plots = draw_all(figures)
    (folder / "plots").mkdir()
    for name, (png, svg, _) in plots.items():
        (folder / "plots" / f"{name}.png").write_bytes(png)
        (folder / "plots" / f"{name}.svg").write_text(svg, encoding="utf-8")
    captions = {name: caption for name, (_, _, caption) in plots.items()}
    svgs = {name: embeddable_svg(svg, name) for name, (_, svg, _) in plots.items()}
    title = f"sparkinfer {run.info['version']}: {run.info['run']}"
    texts["report.html"] = to_html(title, page_blocks(figures, captions), svgs, commands)
    for name, text in texts.items():
        (folder / name).write_text(relative_paths(text, repository), encoding="utf-8")
    parquet.write([m.folder for m in run.measurements], folder / "requests.parquet")


def _swap(new: Path, target: Path) -> None:
    """Put `new` in the place of `target`; an existing report is removed only after that."""
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_report(run_folder: Path, output: Path, repository: Path, changes: Path) -> None:
    """Render a run. Raises ConfigError for raw results that are not fit, and for a target that is signed or cannot be
    written."""
    run = load_run(run_folder)
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} exists and is no folder: choose another --output")
    bundles = output / "bundles"
    if bundles.is_dir() and any(bundles.iterdir()):
        raise ConfigError(f"{output} is signed (bundles/ is not empty): a new rendering would not fit its signatures; "
                          "choose another --output")  # fmt: skip
    require_folder(output.parent, "--output")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write_all(run, temporary, repository, changes)
        _swap(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
