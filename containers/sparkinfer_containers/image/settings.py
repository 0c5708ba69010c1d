"""`containers/image.toml` as typed settings."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer_containers.entrypoint import COMMIT

NAME_SETTING = "ATTEST_IMAGE_NAME"
PRESET = "SPARKINFER_PRESET_"


@dataclass(frozen=True, slots=True)
class Variant:
    """Packages of one variant: Debian's, Python's roots, and the project locks these are resolved within.

    `unconstrained` names packages whose version the variant's torch chooses instead of the locks.
    """

    name: str
    packages: list[str]
    python: list[str]
    constraints: list[str]
    unconstrained: list[str]


@dataclass(frozen=True, slots=True)
class Preset:
    """What an image's name stands for: a default model, its drafter ("": none) and settings.

    `revision` is the hub's commit, "" where none is known: then the user has to give one.
    """

    title: str
    folder: str
    hub: str
    revision: str
    drafter: str
    settings: dict[str, str]

    def environment(self) -> dict[str, str]:
        """Variables of the image, read by sparkinfer_containers.entrypoint; what is not known is left out."""
        named = {"FOLDER": self.folder, "HUB": self.hub, "REVISION": self.revision, "DRAFTER": self.drafter}
        return {**{PRESET + name: value for name, value in named.items() if value}, **self.settings}


@dataclass(frozen=True, slots=True)
class Recipe:
    """All settings of one image."""

    name: str
    preset: Preset
    version: str
    registry: str
    source: str
    suite: str
    python: str
    epoch: int
    user: int
    variant: Variant
    omit: dict[str, str]
    kept: dict[str, str]
    stripped: list[str]
    containers: Path

    @property
    def reference(self) -> str:
        """`<registry>/<name>:<version>`, with the variant behind the version unless it is the GPU's."""
        return f"{self.registry}/{self.name}:{self.tag}"

    @property
    def tag(self) -> str:
        """The image's tag."""
        return self.version if self.variant.name == "cuda13" else f"{self.version}-{self.variant.name}"

    @property
    def debian_lock(self) -> Path:
        """The variant's locked Debian packages."""
        return self.containers / "locks" / f"debian-{self.variant.name}.json"

    @property
    def backend_lock(self) -> Path:
        """The hashed wheels that build the project's own wheel, the same for all variants."""
        return self.containers / "locks" / "build.txt"

    @property
    def python_lock(self) -> Path:
        """The variant's hashed wheels."""
        return self.containers / "locks" / f"python-{self.variant.name}.txt"


def load(repository: Path, variant: str, name: str | None = None) -> Recipe:
    """The recipe of `variant` in a checkout. Raises ConfigError for an unknown name or variant, or a broken file."""
    containers = repository / "containers"
    try:
        data: dict[str, Any] = tomllib.loads((containers / "image.toml").read_text(encoding="utf-8"))
        version = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise ConfigError(f"{repository} is not a checkout of this project: {error}") from error
    image = data["image"]
    chosen = name or os.environ.get(NAME_SETTING) or image["name"]
    if chosen not in data["presets"]:
        raise ConfigError(f"image name {chosen!r} is unknown: {', '.join(sorted(data['presets']))} are in image.toml")
    if variant not in data["variants"]:
        raise ConfigError(f"variant {variant!r} is unknown: {', '.join(sorted(data['variants']))} are in image.toml")
    preset = Preset(**data["presets"][chosen])
    if preset.revision and not COMMIT.match(preset.revision):
        raise ConfigError(f"image.toml, {chosen}: revision {preset.revision!r} is no commit of 40 hexadecimal digits")
    return Recipe(
        name=chosen,
        preset=preset,
        version=version,
        registry=image["registry"],
        source=image["source"],
        suite=image["suite"],
        python=image["python"],
        epoch=image["epoch"],
        user=image["user"],
        variant=Variant(variant, **data["variants"][variant]),
        omit=dict(data["omit"]),
        kept=dict(data["kept"]),
        stripped=list(data["stripped"]["libraries"]),
        containers=containers,
    )
