"""Figures of the container: build time cold and warm, size by layer and package, signing, verification, rebuild.

Everything is done once more from an empty folder with empty download caches, timed, and written as `figures.json` and
`README.md` (for another variant than `cpu`: under its name); no figure is typed by hand.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkinfer_eval.report.document import Block, Bullets, Heading, Paragraph, Table, to_markdown
from sparkinfer_eval.report.machine import machine_facts
from sparkinfer_eval.report.text import machine_line

from sparkinfer.errors import EnvironmentProblem
from sparkinfer_containers import ship
from sparkinfer_containers.image import build, rebuild
from sparkinfer_containers.image.settings import Recipe

SCHEMA = "sparkinfer/container-figures/v1"
LIMITS = {"sign and attach": 2.0, "verify": 10.0}
"""Seconds that a step may take, for every variant."""
DEBIAN_TOOLS = ("mmdebstrap", "bubblewrap", "docker-registry")
LARGEST = 12


def _timed(seconds: dict[str, float], name: str, step: Callable[[], Any]) -> Any:
    start = time.monotonic()
    made = step()
    seconds[name] = round(time.monotonic() - start, 2)
    print(f"{name}: {seconds[name]:.1f} s", flush=True)
    return made


def _versions(recipe: Recipe) -> dict[str, str]:
    """Versions of the Debian programs that take part, besides those that provenance names."""
    query = ["dpkg-query", "--show", "--showformat=${Package} ${Version}\\n", *DEBIAN_TOOLS]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines()) | build.tool_versions(recipe)


def measure(
    recipe: Recipe, repository: Path, model: Path | None, scratch: Path, sign: Callable[[Path], None], command: str
) -> dict[str, Any]:
    """All figures. `sign` signs and attaches provenance and SBOM to the image folder it is given; without a `model` the
    pulled image is examined and not served.

    Raises EnvironmentProblem when a second build differs or a step takes longer than LIMITS allows.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    begun, load = datetime.now(UTC), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="figures-", dir=scratch.absolute()) as name:
        folder = Path(name)
        folder.chmod(0o755)  # mmdebstrap's apt reads the packages as its own user
        caches = build.Caches(folder / "debs", folder / "wheels")
        image = folder / "image"

        def built() -> dict[str, Any]:
            return build.build(recipe, repository, image, caches)

        record = _timed(seconds, "build, nothing cached", built)
        downloaded = {part: sum(p.stat().st_size for p in (folder / part).iterdir()) for part in ("debs", "wheels")}
        again = folder / "elsewhere"
        differ = _timed(
            seconds,
            "second build from a fresh clone, downloads cached",
            lambda: rebuild.rebuild(image, repository, caches, again),
        )
        if differ:
            raise EnvironmentProblem("a second build differs:\n" + "\n".join(differ))
        _timed(seconds, "sign and attach", lambda: sign(image))
        shipped = ship.ship(image, model, folder / "registry")
        shutil.rmtree(folder / "registry")
    seconds |= shipped["seconds"]
    slow = [f"{step} took {seconds[step]} s, over {limit} s" for step, limit in LIMITS.items() if seconds[step] > limit]
    if slow:
        raise EnvironmentProblem("; ".join(slow))
    return {
        "schema": SCHEMA,
        "image": {key: record[key] for key in ("reference", "digest", "source_digest", "commit", "variant")},
        "measured": begun.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command,
        "machine": machine_facts(),
        "load_average": round(load, 2),
        "versions": _versions(recipe),
        "seconds": seconds,
        "downloaded_bytes": downloaded,
        "reproduced": True,
        "unpacked_bytes": record["unpacked_bytes"],
        "layers": record["layers"],
        "left_out": record["left_out"],
        "trust": shipped["level"],
    }


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def blocks(figures: dict[str, Any]) -> list[Block]:
    """The page that shows the figures."""
    image, versions = figures["image"], figures["versions"]
    downloaded = figures["downloaded_bytes"]
    packages = [(layer["name"], name, size) for layer in figures["layers"] for name, size in layer["packages"].items()]
    packages.sort(key=lambda item: (-item[2], item[1]))
    left_out = sorted(figures["left_out"], key=lambda item: -item["bytes"])
    return [
        Heading(1, f"Figures of the {image['variant']} image"),
        Paragraph(f"`{image['reference']}`, `{image['digest']}`, made by a program; do not edit."),
        Bullets(
            [
                f"Machine: {machine_line(figures['machine'])}.",
                f"Versions: {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}.",
                f"Measured: {figures['measured']}, commit `{image['commit']}`.",
                f"Command: `{command}`."
                if (command := figures["command"])
                else "Command: its options were not recorded.",
                # Absent from what was recorded before it was asked for.
                *([f"Load average at the start: {load}."] if (load := figures.get("load_average")) is not None else []),
                f"The second build has the same digest: {'yes' if figures['reproduced'] else 'no'}.",
                f"Signed with trust level: {figures['trust']}.",
            ]
        ),
        Heading(2, "Time"),
        Table(["step", "s"], [[name, f"{value:.1f}"] for name, value in figures["seconds"].items()]),
        Paragraph(
            f"Downloaded by the first build: {_megabytes(downloaded['debs'])} MB of Debian packages and "
            f"{_megabytes(downloaded['wheels'])} MB of wheels. The registry is on this machine."
        ),
        Heading(2, "Size by layer"),
        Table(
            ["layer", "MB"],
            [[layer["name"], _megabytes(layer["size"])] for layer in figures["layers"]]
            + [["unpacked", _megabytes(figures["unpacked_bytes"])]],
        ),
        Heading(2, "The largest packages"),
        Table(
            ["package", "layer", "MB"],
            [[name, layer, _megabytes(size)] for layer, name, size in packages[:LARGEST]]
            + [[f"{len(packages) - LARGEST} others", "", _megabytes(sum(item[2] for item in packages[LARGEST:]))]],
        ),
        Heading(2, "Left out of the installed packages"),
        Table(
            ["pattern", "MB", "reason"],
            [[f"`{item['pattern']}`", _megabytes(item["bytes"]), item["reason"]] for item in left_out],
        ),
    ]


def write(figures: dict[str, Any], output: Path) -> None:
    """The figures and their page in `output`, each by rename: figures.json and README.md, or <variant>.json and .md."""
    output.mkdir(parents=True, exist_ok=True)
    variant = figures["image"]["variant"]
    data, page = ("figures.json", "README.md") if variant == "cpu" else (f"{variant}.json", f"{variant}.md")
    texts = {data: json.dumps(figures, indent=1) + "\n", page: to_markdown(blocks(figures))}
    for name, text in texts.items():
        temporary = output / f".{name}.part"
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(output / name)
