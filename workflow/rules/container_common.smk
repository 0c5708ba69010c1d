# What the container rules share: which image, by variant and by the digest of all that decides it.

import tomllib

from sparkinfer_containers.image.choice import image_folder

IMAGE_VARIANTS = list(
    tomllib.loads((ROOT / "containers" / "image.toml").read_text())["variants"]
)
CONTAINERS = "PYTHONPATH=.:containers:eval .venv/bin/python -m sparkinfer_containers"
VERIFY = (
    "PYTHONPATH=.:containers:eval .venv/bin/python -m sparkinfer_containers.verify.cli"
)
IMAGE_FOLDER, IMAGE_COMMIT = image_folder(ROOT, PLAN_OF["release"].device)
TRUST = PLAN_OF["release"].settings.get("trust", "private")


def image_file(kind):
    """A record about the image of this checkout: `image`, `rebuilt`, `attested` or `shipped`."""
    return f"{IMAGE_FOLDER}/{kind}.json"


def image_of(wildcards, kind="image"):
    """A record about the image that a run measures; nothing for a run of the source tree."""
    record = CHOICE_OF[wildcards.run].record
    return str(Path(record).with_name(f"{kind}.json")) if record else []


def built(record):
    """The folder that the build of an image made."""
    return str(Path(record).parent / "built")


def question_model(wildcards):
    """The model that a pulled image is asked with: the first one of the release."""
    plan = PLAN_OF["release"]
    return f"{model_folder(next(iter(plan.models.values())))}.json"
