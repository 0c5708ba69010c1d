"""A report's text as data (headings, paragraphs, lists, tables, figures), rendered as Markdown and as HTML.

Both renderings come from the same blocks, so that they cannot differ in a number.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading of level 1 (title) to 4."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Running text; `code` spans in backticks are understood by both renderings."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """An unordered list."""

    items: list[str]


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first column holds the row names. Cells are finished text."""

    header: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.header)]
        if wrong:
            raise ValueError(f"table of {len(self.header)} columns has a row of {len(wrong[0])}: {wrong[0]}")

    def numeric(self, column: int) -> bool:
        """Whether a column holds figures (or dashes and missing ones), and is set flush right."""
        texts = [row[column] for row in self.rows]
        return column > 0 and all(re.match(r"[-–\d]|missing$", text) for text in texts)


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot of the report, by the stem of its files under plots/."""

    name: str
    caption: str


Block = Heading | Paragraph | Bullets | Table | Picture


def _cell(text: str) -> str:
    """Text of a Markdown table cell: pipes and line ends would break the row."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _markdown_block(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Paragraph(text):
            return text
        case Bullets(items):
            return "\n".join(f"- {item}" for item in items)
        case Table(header, rows) as table:
            lines = ["| " + " | ".join(_cell(c) for c in header) + " |"]
            lines.append("|" + "|".join("---:" if table.numeric(i) else "---" for i in range(len(header))) + "|")
            lines += ["| " + " | ".join(_cell(c) for c in row) + " |" for row in rows]
            return "\n".join(lines)
        case Picture(name, caption):
            return f"![{caption}](plots/{name}.svg)"


def to_markdown(blocks: list[Block]) -> str:
    """Markdown (GitHub flavour), blocks separated by empty lines, ending in a newline."""
    return "\n\n".join(_markdown_block(block) for block in blocks) + "\n"


def _inline(text: str) -> str:
    """Escaped HTML with `code` spans."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))


def _html_table(table: Table) -> str:
    kinds = ["" if table.numeric(index) else ' class="text"' for index in range(len(table.header))]
    head = "".join(f"<th{kind}>{_inline(c)}</th>" for kind, c in zip(kinds, table.header, strict=True))
    body = "\n".join(
        f'<tr><th class="text">{_inline(row[0])}</th>'
        + "".join(f"<td{kind}>{_inline(c)}</td>" for kind, c in zip(kinds[1:], row[1:], strict=True))
        + "</tr>"
        for row in table.rows
    )
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _html_block(block: Block, svgs: dict[str, str]) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{_inline(text)}</p>"
        case Bullets(items):
            return "<ul>\n" + "\n".join(f"<li>{_inline(item)}</li>" for item in items) + "\n</ul>"
        case Table():
            return _html_table(block)
        case Picture(name, caption):
            return f"<figure>{svgs[name]}<figcaption>{_inline(caption)}</figcaption></figure>"


def embeddable_svg(svg: str, prefix: str) -> str:
    """An SVG file's root element for use inside HTML: no prolog, no metadata, no namespace URIs, ids prefixed.

    Prefixed ids keep the clip paths and glyphs of several plots on one page apart.
    """
    start = svg.index("<svg")
    body = re.sub(r"<metadata>.*?</metadata>", "", svg[start:], flags=re.DOTALL)
    body = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", body).replace("xlink:href", "href")
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'href="#', f'href="#{prefix}-', body)
    body = re.sub(r"url\(#", f"url(#{prefix}-", body)
    return body.strip()


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; max-width: 72rem; margin: 2rem auto;
       padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; } h2 { border-bottom: 1px solid #d0d7de; padding-bottom: .25rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { border: 1px solid #d0d7de; padding: .25rem .6rem; text-align: right; } thead th { background: #f3f5f7; }
.text { text-align: left; } tbody th { font-weight: 500; } code { background: #f3f5f7; padding: 0 .2rem; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
figcaption { color: #57606a; font-size: .9rem; }
pre { background: #f3f5f7; padding: .75rem; overflow-x: auto; font-size: .85rem; }
"""


def to_html(title: str, blocks: list[Block], svgs: dict[str, str], commands: str) -> str:
    """One self-contained page: tables, plots as inline SVG and the commands; it loads nothing from elsewhere."""
    body = "\n".join(_html_block(block, svgs) for block in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n"
        f"<h2>Commands</h2>\n<pre>{html.escape(commands, quote=False)}</pre>\n</body>\n</html>\n"
    )
