"""The engine process runs the model and nothing else: text is the server's, on a core and a thread of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import sparkinfer

TEXT = ("tokenizers", "transformers", "jinja2", "starlette", "sparkinfer.server")


def test_the_engine_process_has_neither_tokenizer_nor_server() -> None:
    """Nothing that detokenises can even be called between two steps."""
    code = (
        f"import sys; sys.path[:0] = {[str(Path(sparkinfer.__file__).parents[1]), *sys.path]!r}; "
        "import sparkinfer.engine.process, sparkinfer.engine.build; "
        f"print([name for name in {TEXT!r} if any(m == name or m.startswith(name + '.') for m in sys.modules)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
