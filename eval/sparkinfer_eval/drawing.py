"""A figure as files: PNG and SVG, both small, and byte-identical for the same data."""

from __future__ import annotations

import io
import re

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

PNG_COLOURS = 64
PNG_DPI = 150
# A coordinate with more than two decimals; the scale of a font's outlines is one of its own.
_LONG = re.compile(r"(?<!scale\()(?<![\d.])(-?\d+)\.(\d{3,})")
_INDENT = re.compile(r"\n +")


def render(canvas: Figure, name: str) -> tuple[bytes, str]:
    """The figure as PNG bytes and as SVG text, both free of dates. `name` tells its SVG ids from another one's."""
    png, svg = io.BytesIO(), io.StringIO()
    canvas.savefig(png, format="png", dpi=PNG_DPI, metadata={"Software": None})
    with matplotlib.rc_context({"svg.hashsalt": f"sparkinfer-{name}"}):
        canvas.savefig(svg, format="svg", metadata={"Date": None})
    return palette(png), _smaller(svg.getvalue())


def palette(png: io.BytesIO) -> bytes:
    """The picture with a palette: lines and text need few colours, and it is a third as large."""
    small = io.BytesIO()
    picture = Image.open(png).convert("RGB").quantize(PNG_COLOURS, dither=Image.Dither.NONE)
    picture.save(small, format="PNG", optimize=True)
    return small.getvalue()


def _smaller(svg: str) -> str:
    """The drawing without indentation, coordinates to a hundredth of a point: five sixths of matplotlib's bytes."""
    return _LONG.sub(lambda found: f"{float(found[0]):.2f}", _INDENT.sub("\n", svg))
