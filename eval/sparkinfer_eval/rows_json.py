"""JSON text that a reader can follow and that is not mostly indentation: a line for each innermost list or object."""

from __future__ import annotations

import json
import re
from typing import Any

_INNERMOST = re.compile(r'[\[{]\n(?:[^\[\]{}"]|"(?:\\.|[^"\\])*")*[\]}]')


def rows_json(document: Any, *, sort_keys: bool = False, allow_nan: bool = True) -> str:
    """The document with a line for each list or object that holds no other one; the rest as `json.dumps`."""
    text = json.dumps(document, indent=1, sort_keys=sort_keys, ensure_ascii=False, allow_nan=allow_nan) + "\n"
    return _INNERMOST.sub(lambda found: " ".join(line.strip() for line in found[0].split("\n")), text)
