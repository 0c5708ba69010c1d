"""A figure as files: PNG and SVG, both small, and byte-identical for the same data."""

from __future__ import annotations

import hashlib
import io
import re
from collections import Counter

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

PNG_COLOURS = 64
PNG_DPI = 120
# A coordinate with more than two decimals; the scale of a font's outlines is one of its own.
_LONG = re.compile(r"(?<!scale\()(?<![\d.])(-?\d+)\.(\d{3,})")
_INDENT = re.compile(r"\n +")
_GROUP = re.compile(r'<g id="[^"]*">')
_UNTURNED = re.compile(r' transform="rotate\(-?0 [^)]*\)"')
_STYLE = re.compile(r'\bstyle="([^"]*)"')
_PATH = re.compile(r'\bd="([^"]*)"')
_LETTER = re.compile(r" ?([A-Za-z]) ?")
_GROUP_TAG = re.compile(r"<g [^>]*/>\n?|<g>\n?|<g [^>]*>|</g>\n?")


def render(canvas: Figure, name: str) -> tuple[bytes, str]:
    """The figure as PNG bytes and as SVG text, both free of dates. `name` tells its SVG ids from another one's."""
    png, svg = io.BytesIO(), io.StringIO()
    canvas.savefig(png, format="png", dpi=PNG_DPI, metadata={"Software": None})
    with matplotlib.rc_context({"svg.hashsalt": f"sparkinfer-{name}"}):
        canvas.savefig(svg, format="svg", metadata={"Date": None})
    return palette(png), _smaller(svg.getvalue(), name)


def palette(png: io.BytesIO) -> bytes:
    """The picture with a palette: lines and text need few colours, and it is a third as large."""
    small = io.BytesIO()
    picture = Image.open(png).convert("RGB").quantize(PNG_COLOURS, dither=Image.Dither.NONE)
    picture.save(small, format="PNG", optimize=True)
    return small.getvalue()


def _smaller(svg: str, name: str) -> str:
    """The drawing without indentation and bare groups, coordinates to a hundredth point, repeated styles as classes.

    About a quarter of matplotlib's bytes. Class names begin with a digest of `name`, so that drawings can share a page.
    """
    svg = _LONG.sub(lambda found: f"{float(found[0]):.2f}", _INDENT.sub("\n", svg))
    svg = _UNTURNED.sub("", _GROUP.sub("<g>", svg)).replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    counts = Counter(_STYLE.findall(svg))
    prefix = f"s{hashlib.sha256(name.encode()).hexdigest()[:4]}"
    classes = {style: f"{prefix}-{index}" for index, style in enumerate(s for s, n in counts.items() if n > 1)}
    svg = _STYLE.sub(lambda found: f'class="{classes[found[1]]}"' if found[1] in classes else found[0], svg)
    svg = _PATH.sub(lambda found: _closed_up(found[1]), _ungrouped(svg))
    rules = "".join(f".{short}{{{style}}}\n" for style, short in classes.items())
    return svg.replace("</style>", f"\n{rules}</style>", 1)


def _ungrouped(svg: str) -> str:
    """The drawing without empty groups and those that carry no attribute."""
    bare: list[bool] = []

    def tag(found: re.Match[str]) -> str:
        if "/>" in found[0]:
            return ""
        if found[0].startswith("</"):
            return "" if bare.pop() else found[0]
        bare.append(found[0].startswith("<g>"))
        return "" if bare[-1] else found[0]

    return _GROUP_TAG.sub(tag, svg)


def _closed_up(path: str) -> str:
    """The `d` of a path without blanks around its letters."""
    words = " ".join(path.split())
    return f'd="{_LETTER.sub(lambda found: found[1], words)}"'
