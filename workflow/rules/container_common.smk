# What the container rules share: which image, by variant and commit.

import tomllib

IMAGE_VARIANTS = list(
    tomllib.loads((ROOT / "containers" / "image.toml").read_text())["variants"]
)
CONTAINERS = "PYTHONPATH=.:containers:eval .venv/bin/python -m sparkinfer_containers"


def head_commit():
    """The commit that an image is built from."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "none"


def image_file(kind, variant="cpu"):
    """A record about the image of this commit: `image`, `rebuilt`, `attested` or `shipped`."""
    return f"results/images/{variant}-{head_commit()}/{kind}.json"


def toy_model(wildcards):
    """The model that the pulled image is asked with: the first generated one of the plan."""
    return f"{model_folder(next(iter(PLAN_OF['smoke'].models.values())))}.json"
