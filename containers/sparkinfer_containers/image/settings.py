"""`containers/image.toml` as typed settings."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError

NAME_SETTING = "ATTEST_IMAGE_NAME"


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
class Recipe:
    """All settings of one image."""

    name: str
    title: str
    version: str
    registry: str
    source: str
    suite: str
    python: str
    epoch: int
    user: int
    environment: dict[str, str]
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
    preset = data["presets"][chosen]
    return Recipe(
        name=chosen,
        title=preset["title"],
        version=version,
        registry=image["registry"],
        source=image["source"],
        suite=image["suite"],
        python=image["python"],
        epoch=image["epoch"],
        user=image["user"],
        environment=dict(preset["environment"]),
        variant=Variant(variant, **data["variants"][variant]),
        omit=dict(data["omit"]),
        kept=dict(data["kept"]),
        stripped=list(data["stripped"]["libraries"]),
        containers=containers,
    )
