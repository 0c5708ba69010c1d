"""Where there is no GPU, Triton kernels run in its interpreter; that has to be decided before Triton is imported."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
