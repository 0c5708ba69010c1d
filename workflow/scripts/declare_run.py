"""Complete a run's declaration with the models' digests and let eval/run_info.py write results/<run>/run.json.

usage: declare_run.py --declaration JSON --output FILE [--environment NAME=PYTHON ...]
Exit codes: 0 written, 2 bad input, 3 an environment is missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "eval")]

from sparkinfer_eval.plan.identity import read_manifest  # noqa: E402

from sparkinfer.errors import ConfigError, SparkinferError  # noqa: E402


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write results/<run>/run.json.")
    parser.add_argument("--declaration", type=json.loads, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--environment", action="append", default=[])
    args = parser.parse_args(argv)
    try:
        for model in args.declaration["models"]:
            folder = Path(model.pop("folder"))
            manifest = read_manifest(folder.with_name(f"{folder.name}.json"))
            if manifest["definition"] != model.pop("definition"):
                raise ConfigError(f"{folder} is another model than this run wants: remove it and its .json")
            model["digest"] = manifest["model_digest"]
    except SparkinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as spec:
        json.dump(args.declaration, spec)
        spec.flush()
        command = [
            sys.executable,
            str(ROOT / "eval" / "run_info.py"),
            "--spec",
            spec.name,
            "--output",
            str(args.output),
        ]
        for item in args.environment:
            command += ["--environment", item]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
