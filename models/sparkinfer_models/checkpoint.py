"""Writing and reading: resumable training checkpoints, and the finished model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkinfer.errors import CheckpointError, ConfigError, EnvironmentProblem
from sparkinfer_models.config import ModelConfig
from sparkinfer_models.network import Network, parameter_shapes
from sparkinfer_models.tokenizer import END_OF_TEXT_ID, IM_END_ID


def save_training(path: Path, state: dict[str, Any]) -> None:
    """Writes a training checkpoint to a temporary name, then renames it: a kill leaves the previous one intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    torch.save(state, temporary)
    temporary.rename(path)


def training_device(name: str) -> torch.device:
    """The device of that name. Raises ConfigError for a name that is none, EnvironmentProblem when it is absent."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblem(f"--device {name}: torch {torch.__version__} finds no CUDA device here; use cpu")
    return device


def check_unused(folder: Path) -> None:
    """Raises ConfigError when an earlier run has written to the folder: its log would go on with this one's."""
    for name in ("training.pt", "training_log.jsonl"):
        if (folder / name).exists():
            raise ConfigError(f"{folder} holds {name} of an earlier run: go on with --resume, or give another --out")


def load_training(path: Path, device: torch.device) -> dict[str, Any]:
    """Reads a training checkpoint written by `save_training`."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: start without --resume, or name the folder of an earlier run")
    return torch.load(path, map_location=device, weights_only=True)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes BF16 safetensors, to a temporary name first.

    Raises:
        CheckpointError: a tensor holds NaN or infinity.
    """
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{name} holds NaN or infinity: the model is not written")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    rounded = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in tensors.items()}
    save_file(rounded, str(temporary), metadata={"format": "pt"})
    temporary.rename(path)


def save_model(network: Network, folder: Path) -> None:
    """Writes `model.safetensors`, `config.json` and `generation_config.json`."""
    save_tensors(network.checkpoint(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(network.config.to_hf(), indent=2) + "\n")
    # No sampling defaults: engines differ in whether they apply them, and requests here say what they want.
    generation = {
        "eos_token_id": [IM_END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_network(
    folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu", compiled: bool = False
) -> Network:
    """Reads a model folder into the training network.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another shape.
    """
    config = ModelConfig.from_hf(folder)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    tensors = load_file(str(path))
    shapes = parameter_shapes(config)
    if tensors.keys() != shapes.keys():
        raise CheckpointError(f"{path}: tensors differ from the config: {sorted(tensors.keys() ^ shapes.keys())[:4]}")
    network = Network(config, dtype, compiled)
    with torch.no_grad():
        for name, value in network.checkpoint().items():
            if tensors[name].shape != value.shape:
                raise CheckpointError(f"{path}: {name} is {tuple(tensors[name].shape)}, not {tuple(value.shape)}")
            value.copy_(tensors[name].float())
    return network.to(device)
