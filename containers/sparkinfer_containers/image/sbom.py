"""CycloneDX bill of materials of an image: every Debian and Python package, with version, purl and digest."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from sparkinfer_containers.image.debs import DebianLock
from sparkinfer_containers.image.settings import Recipe
from sparkinfer_containers.image.wheels import Wheel


def _component(name: str, version: str, purl: PackageURL, sha256: str) -> Component:
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=sha256)]
    return Component(
        type=ComponentType.LIBRARY, name=name, version=version, purl=purl, bom_ref=purl.to_string(), hashes=hashes
    )


def make(recipe: Recipe, digest: str, lock: DebianLock, wheels: list[Wheel]) -> str:
    """The document as JSON text; equal input gives equal bytes (serial number and time come from the image)."""
    components = [
        _component(
            deb.name,
            deb.version,
            PackageURL("deb", "debian", deb.name, deb.version, {"arch": deb.architecture, "distro": lock.suite}),
            deb.sha256,
        )
        for deb in lock.debs
    ]
    components += [
        _component(wheel.name, wheel.version, PackageURL("pypi", None, wheel.name.lower(), wheel.version), wheel.sha256)
        for wheel in wheels
    ]
    image = Component(
        type=ComponentType.CONTAINER,
        name=recipe.name,
        version=recipe.version,
        bom_ref="image",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest.removeprefix("sha256:"))],
    )
    metadata = BomMetaData(component=image, timestamp=datetime.fromtimestamp(recipe.epoch, UTC))
    bom = Bom(components=components, metadata=metadata, serial_number=uuid5(NAMESPACE_URL, digest))
    bom.register_dependency(image, components)
    data = json.loads(JsonV1Dot6(bom).output_as_string())
    return json.dumps(data, indent=1, sort_keys=True) + "\n"
