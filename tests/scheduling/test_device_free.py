"""The package runs on any machine: importing it brings in no tensor library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import sparkinfer.scheduling

MODULES = sorted(p.stem for p in Path(sparkinfer.scheduling.__file__).parent.glob("*.py") if p.stem != "__init__")


def test_importing_imports_no_torch() -> None:
    root = Path(sparkinfer.scheduling.__file__).parents[2]
    imports = "; ".join(f"import sparkinfer.scheduling.{name}" for name in MODULES)
    code = f"import sys; sys.path.insert(0, {str(root)!r}); {imports}; import sparkinfer.engine.core"
    check = "; bad = {'torch', 'transformers'} & set(sys.modules); sys.exit(f'imported: {bad}' if bad else 0)"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert len(MODULES) > 15
