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
    assert [element.tag for element in shapes(svg)] == [element.tag for element in shapes(plain.getvalue())]
    assert [path.split() for path in paths(svg)] == [path.split() for path in map(rounded, paths(plain.getvalue()))]
    assert "<g>" not in svg
    picture = Image.open(io.BytesIO(png))
    assert picture.mode == "P"
    assert len(picture.getcolors() or []) <= PNG_COLOURS


def shapes(svg: str) -> list[ET.Element]:
    """All elements but groups that say nothing."""
    found = ET.fromstring(svg).iter()
    return [element for element in found if not (element.tag.endswith("}g") and not {*element.attrib} - {"id"})]


def paths(svg: str) -> list[str]:
    """What is drawn, a blank around every letter."""
    return [re.sub("([MLQCz])", r" \1 ", element.get("d", "")) for element in shapes(svg)]


def rounded(text: str) -> str:
    return re.sub(r"(?<![\d.])-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", text)


def test_groups_with_attributes_stay() -> None:
    text = '<svg><g id="a">\n<g clip-path="url(#c)">\n<path d="M 1 2 \nL 3 -4 \nz\n"/>\n</g>\n</g>\n</svg>'
    assert _smaller(text, "a") == '<svg><g clip-path="url(#c)">\n<path d="M1 2L3 -4z"/>\n</g>\n</svg>'


def test_coordinates_are_rounded_and_the_scale_of_letters_is_not() -> None:
    text = 'transform="scale(0.015625)" d="M 12.345678 -0.004999\n   L 3.25 1"'
    assert _smaller(text, "a") == 'transform="scale(0.015625)" d="M12.35 -0.00L3.25 1"'


def styles(svg: str) -> list[str]:
    """Each element's style, by class or its own; a text's font without what stands in for it."""
    rules = dict(re.findall(r"\.([\w-]+)\{([^}]*)\}", svg))
    found = []
    for element in shapes(svg):
        style = element.get("style") or rules.get(element.get("class", ""), "")
        found.append(style.replace(", Verdana, sans-serif", ""))
    return found


def test_classes_say_what_the_styles_said_and_share_a_page() -> None:
    plain = io.StringIO()
    drawn().savefig(plain, format="svg", metadata={"Date": None})
    _, one = render(drawn(), "a")
    _, other = render(drawn(), "b")
    assert styles(one) == styles(other) == [rounded(style) for style in styles(plain.getvalue())]
    classes = [set(re.findall(r'class="([^"]+)"', svg)) for svg in (one, other)]
    assert classes[0]
    assert not classes[0] & classes[1]
