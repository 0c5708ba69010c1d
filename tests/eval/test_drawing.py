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
    assert _smaller(text) == 'transform="scale(0.015625)" d="M 12.35 -0.00\nL 3.25 1"'
