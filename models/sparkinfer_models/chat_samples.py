"""Question-and-answer samples drawn from the corpus by its own structure: docstrings, functions, sections."""

from __future__ import annotations

import ast
import hashlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from sparkinfer_models.sources import Document

MAX_CODE_LINES = 30
MAX_ANSWER_CHARS = 1500


@dataclass(frozen=True)
class ChatSample:
    """One exchange; `path` names the document it came from, so that it stays on that document's side of the split."""

    path: str
    question: str
    answer: str


_WRITE = (
    "Write a Python function named `{name}`. {summary}",
    "Write `{signature}` in Python. {summary}",
    "Please implement the function `{name}` that does this: {summary}",
)
_EXPLAIN = (
    "What does this function do?\n\n```python\n{code}\n```",
    "Write a docstring for this function.\n\n```python\n{code}\n```",
    "Explain the following code.\n\n```python\n{code}\n```",
)
_SECTION = (
    'Write the section "{title}" of the documentation.',
    "Explain: {title}",
    "What does the documentation say about {title}?",
)


def _pick(options: tuple[str, ...], key: str) -> str:
    return options[hashlib.sha256(key.encode()).digest()[0] % len(options)]


def _dedent(code: str) -> str:
    lines = code.split("\n")
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[indent:] for line in lines)


def _python_samples(document: Document) -> Iterator[ChatSample]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(document.text)
    except SyntaxError:  # a template, or Python 2: it stays in the corpus as text, and gives no samples
        return
    lines = document.text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        doc = ast.get_docstring(node)
        start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        code = lines[start : node.end_lineno]
        if not doc or len(doc) < 20 or len(code) > MAX_CODE_LINES or len(node.body) < 2:
            continue
        summary = " ".join(doc.split("\n\n")[0].split())
        if not summary.isascii() or len(summary) > 300:
            continue
        key = f"{document.path}:{node.name}:{node.lineno}"
        docstring = node.body[0]
        without = code[: docstring.lineno - 1 - start] + code[(docstring.end_lineno or docstring.lineno) - start :]
        signature = f"{node.name}({', '.join(a.arg for a in node.args.args)})"
        full, bare = _dedent("\n".join(code)), _dedent("\n".join(without))
        if hashlib.sha256(key.encode()).digest()[1] % 2:
            question = _pick(_WRITE, key).format(name=node.name, summary=summary, signature=signature)
            yield ChatSample(document.path, question, f"```python\n{full}\n```")
        elif len(doc) < MAX_ANSWER_CHARS:
            yield ChatSample(document.path, _pick(_EXPLAIN, key).format(code=bare), doc)


def _prose_samples(document: Document) -> Iterator[ChatSample]:
    pieces = re.split(r"^([A-Z`][^\n]{3,70})\n[=\-~*^\"]{4,}\n", document.text, flags=re.M)
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        paragraphs = re.split(r"\n\n+", body.strip())
        answer = ""
        for paragraph in paragraphs:
            if len(answer) + len(paragraph) > MAX_ANSWER_CHARS:
                break
            answer += paragraph + "\n\n"
        answer = answer.strip()
        if len(answer) > 80 and answer[0].isalpha():
            yield ChatSample(document.path, _pick(_SECTION, document.path + title).format(title=title.strip()), answer)


def chat_samples(documents_: list[Document]) -> list[ChatSample]:
    """All samples that the documents give, in their order."""
    samples: list[ChatSample] = []
    for document in documents_:
        if document.kind == "python":
            samples += _python_samples(document)
        elif document.kind == "prose":
            samples += _prose_samples(document)
    return samples
