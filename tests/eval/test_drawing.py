"""Figures as files: small, the same for the same data, and still what was drawn."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET

from matplotlib.figure import Figure
from PIL import Image
from sparkinfer_eval.drawing import PNG_COLOURS, _smaller, render


def drawn() -> Figure:
    canvas = Figure(figsize=(4, 3))
    axes = canvas.subplots()
    axes.plot([0.0, 1.0, 3.0], [0.123456, 7.0, 2.0], label="0.12345 x")
    axes.legend()
    return canvas


def test_the_same_data_gives_the_same_files() -> None:
    assert render(drawn(), "a") == render(drawn(), "a")


def test_the_svg_is_small_and_whole() -> None:
    png, svg = render(drawn(), "a")
    plain = io.StringIO()
    drawn().savefig(plain, format="svg", metadata={"Date": None})
    assert len(svg) < 0.9 * len(plain.getvalue())
    assert not re.search(r"\d\.\d{3}", svg.replace("scale(0.015625)", ""))
    names = [element.tag for element in ET.fromstring(svg).iter()]
    assert names == [element.tag for element in ET.fromstring(plain.getvalue()).iter()]
    picture = Image.open(io.BytesIO(png))
    assert picture.mode == "P"
    assert len(picture.getcolors() or []) <= PNG_COLOURS


def test_coordinates_are_rounded_and_the_scale_of_letters_is_not() -> None:
    text = 'transform="scale(0.015625)" d="M 12.345678 -0.004999\n   L 3.25 1"'
    assert _smaller(text, "a") == 'transform="scale(0.015625)" d="M 12.35 -0.00\nL 3.25 1"'


def styles(svg: str) -> list[str]:
    """Each element's style, by class or its own; a text's font without what stands in for it."""
    rules = dict(re.findall(r"\.([\w-]+)\{([^}]*)\}", svg))
    found = []
    for element in ET.fromstring(svg).iter():
        style = element.get("style") or rules.get(element.get("class", ""), "")
        found.append(style.replace(", Verdana, sans-serif", ""))
    return found


def test_classes_say_what_the_styles_said_and_share_a_page() -> None:
    plain = io.StringIO()
    drawn().savefig(plain, format="svg", metadata={"Date": None})
    _, one = render(drawn(), "a")
    _, other = render(drawn(), "b")
    rounded = [
        re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", style) for style in styles(plain.getvalue())
    ]
    assert styles(one) == styles(other) == rounded
    classes = [set(re.findall(r'class="([^"]+)"', svg)) for svg in (one, other)]
    assert classes[0]
    assert not classes[0] & classes[1]
