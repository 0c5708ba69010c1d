"""Whether a GPU can run this engine: one clear line, with the numbers, when it cannot."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from sparkinfer.errors import EnvironmentProblem

MIN_CAPABILITY = (8, 9)
"""FP8 tensor cores: Ada, Hopper, Blackwell. The kernels are compiled and tuned for 9.0 and 12.0."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What is decided on."""

    name: str
    capability: tuple[int, int]
    driver_cuda: tuple[int, int]
    """Newest CUDA version that the driver runs."""
    torch_cuda: tuple[int, int]
    """CUDA version that torch was built with."""
    free_bytes: int
    total_bytes: int


def driver_version() -> int:
    """CUDA version of the driver, 13000 for 13.0. Raises EnvironmentProblem when there is no driver."""
    number = ctypes.c_int()
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError as error:
        raise EnvironmentProblem(
            f"no NVIDIA driver is installed ({error}); install one, or use --device cpu"
        ) from error
    if code:
        raise EnvironmentProblem(f"the NVIDIA driver does not say its version (error {code}); use --device cpu")
    return number.value


def _version(number: int) -> tuple[int, int]:
    """13000 -> (13, 0)."""
    return number // 1000, number % 1000 // 10


def check(facts: GpuFacts) -> None:
    """Raises EnvironmentProblem when the GPU or its driver is too old."""
    if facts.driver_cuda[0] < facts.torch_cuda[0]:
        raise EnvironmentProblem(
            f"the NVIDIA driver is too old: it runs CUDA {_dotted(facts.driver_cuda)}, torch {torch.__version__} needs "
            f"CUDA {_dotted(facts.torch_cuda)}; update the driver, or use --device cpu"
        )
    if facts.capability < MIN_CAPABILITY:
        raise EnvironmentProblem(
            f"{facts.name} has compute capability {_dotted(facts.capability)}; this engine needs at least "
            f"{_dotted(MIN_CAPABILITY)} (FP8 tensor cores): use a newer card, or --device cpu"
        )


def read_facts(device: torch.device) -> GpuFacts:
    """The facts of a device. Raises EnvironmentProblem when torch cannot use it."""
    if torch.version.cuda is None:
        raise EnvironmentProblem(
            f"device {device}: torch {torch.__version__} is a CPU build; install a CUDA build, or use --device cpu"
        )
    major, minor = torch.version.cuda.split(".")[:2]
    driver = _version(driver_version())
    needs = int(major), int(minor)
    if driver[0] < needs[0]:
        # Asking torch for the device would fail with a less helpful message.
        check(GpuFacts("", MIN_CAPABILITY, driver, needs, 0, 0))
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise EnvironmentProblem(f"device {device} is not present: {count} CUDA devices found; use --device cpu")
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return GpuFacts(properties.name, (properties.major, properties.minor), driver, needs, free, total)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
