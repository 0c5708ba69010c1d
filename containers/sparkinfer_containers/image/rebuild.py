"""Build an image a second time, elsewhere, from a fresh clone, and name every path that came out different."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from sparkinfer_containers.image.build import Caches, build
from sparkinfer_containers.image.difference import differences
from sparkinfer_containers.image.settings import load
from sparkinfer_containers.image.tools import need, run
from sparkinfer_containers.oci.layout import Layout


def rebuild(first: Path, repository: Path, caches: Caches, scratch: Path) -> list[str]:
    """Rebuild the image in `first` (a folder that `build` made) in a new folder; [] when bit-identical.

    The commit that `first` was built from is cloned anew; caches only save downloads, every file in them is checked.
    """
    record = Layout(first / "layout").image()
    said = json.loads((first / "image.json").read_text(encoding="utf-8"))
    scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="rebuild-", dir=scratch.absolute()))
    folder.chmod(0o755)
    try:
        clone = folder / "another place" / "clone"
        run([need("git"), "clone", "--quiet", "--no-local", str(repository), str(clone)])
        run(["git", "-C", str(clone), "checkout", "--quiet", said["commit"]])
        recipe = load(clone, said["variant"], said["name"])
        build(recipe, clone, folder / "image", caches, folder)
        again = Layout(folder / "image" / "layout")
        if again.image().digest == record.digest:
            return []
        return differences(Layout(first / "layout"), again)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
