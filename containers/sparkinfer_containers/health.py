"""The container's health check: exit 0 when the server in this container answers `/health`, else 1."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request


def main() -> int:
    """Ask the server on its port; returns the exit code."""
    address = f"http://127.0.0.1:{os.environ.get('SPARKINFER_PORT', '8000')}/health"
    try:
        with urllib.request.urlopen(address, timeout=4) as answer:
            return 0 if answer.status == 200 else 1
    except (urllib.error.URLError, OSError) as error:
        print(f"{address}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
