"""Make the corpus of this folder again: `python eval/corpus/build.py [--debs FOLDER] [--out FOLDER]`.

Real English prose (the manual's narrative parts) and real Python source, both from Debian 12 packages under the PSF
licence. The packages are fetched with `apt-get download` unless `--debs` names a folder that holds them; their sha256
must match. The texts are then the same bytes everywhere; `SHA256SUMS` holds the digests of the files and of what they
unpack to (the part that counts: another liblzma may compress differently).
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One Debian binary package, by exact version and digest."""

    name: str
    version: str
    arch: str
    sha256: str

    @property
    def file(self) -> str:
        """File name as `apt-get download` writes it."""
        return f"{self.name}_{self.version.replace(':', '%3a')}_{self.arch}.deb"


@dataclass(frozen=True)
class Text:
    """One output file: the files of a package below `root` that match the globs, in path order."""

    output: str
    package: Package
    root: str
    globs: tuple[str, ...]
    exclude: tuple[str, ...] = ()


VERSION = "3.11.2-6+deb12u9"
DOC = Package("python3.11-doc", VERSION, "all", "5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be")
STDLIB = Package(
    "libpython3.11-stdlib",
    VERSION,
    "amd64",
    "10f13e000ee757f5f2d2d3569f9e30546214a0c850acd78695feae373bfa3e53",
)
TEXTS = (
    Text(
        "english.txt",
        DOC,
        "usr/share/doc/python3.11/html/_sources",
        (
            *(f"{part}/**/*.txt" for part in ("extending", "faq", "howto", "reference", "tutorial", "using")),
            "whatsnew/*.txt",
        ),
        # What's New's raw change list is one-line items, not prose.
        ("whatsnew/changelog",),
    ),
    Text(
        "python.txt",
        STDLIB,
        "usr/lib/python3.11",
        (
            "*.py",
            *(f"{part}/**/*.py" for part in ("asyncio", "concurrent", "html", "http", "json", "multiprocessing")),
            *(f"{part}/**/*.py" for part in ("tomllib", "unittest", "wsgiref", "xml", "zoneinfo")),
        ),
        # Settings of the machine that built the package, and a table of letters.
        ("_sysconfigdata",),
    ),
)
LICENCE = ("LICENSE.python.txt", STDLIB, "usr/lib/python3.11/LICENSE.txt")


def fetch(package: Package, debs: Path) -> Path:
    """The package's file in `debs`, downloaded when absent. Exits with the reason when its digest differs."""
    path = debs / package.file
    if not path.exists():
        subprocess.run(["apt-get", "download", f"{package.name}={package.version}"], cwd=debs, check=True)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != package.sha256:
        sys.exit(f"{path.name}: sha256 is {digest}, expected {package.sha256}: another build of the package")
    return path


def collect(text: Text, unpacked: Path) -> str:
    """All matching files as one text: LF line ends, no trailing blanks, a blank line between files."""
    root = unpacked / text.root
    paths = {path for glob in text.globs for path in root.glob(glob) if path.is_file() and not path.is_symlink()}
    pieces = []
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        if any(name.startswith(prefix) for prefix in text.exclude):
            continue
        lines = path.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\f", "").expandtabs().split("\n")
        pieces.append("\n".join(line.rstrip() for line in lines).strip("\n"))
    if not pieces:
        sys.exit(f"{text.output}: nothing below {text.root} matches: another layout of package {text.package.name}")
    return "\n\n".join(piece for piece in pieces if piece) + "\n"


def build(debs: Path, out: Path) -> None:
    """Write the compressed texts, the licence and SHA256SUMS into `out`."""
    sums: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for package in (DOC, STDLIB):
            target = Path(temporary) / package.name
            subprocess.run(["dpkg-deb", "-x", str(fetch(package, debs)), str(target)], check=True)
        for text in TEXTS:
            raw = collect(text, Path(temporary) / text.package.name).encode()
            packed = lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)
            (out / f"{text.output}.xz").write_bytes(packed)
            sums[text.output] = hashlib.sha256(raw).hexdigest()
            sums[f"{text.output}.xz"] = hashlib.sha256(packed).hexdigest()
            print(f"{text.output}: {len(raw)} bytes, {len(packed)} compressed")
        name, package, member = LICENCE
        (out / name).write_bytes((Path(temporary) / package.name / member).read_bytes())
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    (out / "SHA256SUMS").write_text(lines, encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debs", type=Path, help="folder with the packages (default: download into a temporary one)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="where to write")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.debs:
        build(options.debs.resolve(), options.out)
        return
    with tempfile.TemporaryDirectory() as temporary:
        build(Path(temporary), options.out)


if __name__ == "__main__":
    main()
