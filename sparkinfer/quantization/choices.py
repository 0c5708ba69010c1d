"""Which module gets which format: defaults as in published checkpoints, patterns, and what fits no format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparkinfer import __version__
from sparkinfer.errors import ConfigError
from sparkinfer.models.config import LINEAR, ModelConfig
from sparkinfer.models.loader import IGNORED_PREFIXES
from sparkinfer.models.tensors import Role, TensorSpec, language_tensors
from sparkinfer.quantization import fp8, nvfp4
from sparkinfer.quantization.grouping import fused_with
from sparkinfer.quantization.patterns import matches
from sparkinfer.quantization.schemes import LANGUAGE, Format, fp8_config, mixed_config, modelopt_config

KEPT = ("lm_head", "linear_attn.in_proj_a", "linear_attn.in_proj_b")
"""Left in 16 bits unless a pattern says otherwise: the output matrix, and the small projections of decay and beta."""
EXPERTS = ".experts."

Rule = tuple[str, Format | None]
"""A pattern and the format of the modules that it means; None keeps them as they are."""


class Choices:
    """The format of every linear layer of a model. `formats` holds None for those that stay as they are."""

    def __init__(
        self,
        config: ModelConfig,
        default: Format,
        rules: Sequence[Rule] = (),
        stored: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Decide for all modules; of `rules`, the last that means a module wins.

        `stored` are the shapes of the source's tensors: those beside the language model are listed as kept.

        Raises:
            ConfigError: a pattern means no linear layer, or layers that engines run as one differ.
        """
        self.config = config
        self.others = {name: shape for name, shape in (stored or {}).items() if name.startswith(IGNORED_PREFIXES)}
        """Shapes of the tensors of vision tower and MTP head, by name."""
        self.notes: list[str] = []
        """What was left as it is because the format cannot hold its shape, one line for each kind of layer."""
        self.formats: dict[str, Format | None] = {}
        shapes = {}
        used = set()
        for spec in language_tensors(config):
            if spec.role is not Role.LINEAR:
                continue
            choice = None if any(matches(pattern, spec.module) for pattern in KEPT) else default
            for pattern, wanted in rules:
                if matches(pattern, spec.module):
                    choice = wanted
                    used.add(pattern)
            self.formats[spec.module] = choice
            shapes[spec.module] = spec.shape
        for pattern, _ in rules:
            if pattern not in used:
                raise ConfigError(f"pattern {pattern!r} matches no linear layer of this model")
        self._check_fused()
        self._leave_misfits(shapes)

    def _unit(self, module: str) -> str:
        """What must have one format: the fused layer, or all experts of a layer."""
        return module.partition(EXPERTS)[0] + ".experts" if EXPERTS in module else ", ".join(fused_with(module))

    def _check_fused(self) -> None:
        seen: dict[str, tuple[str, Format | None]] = {}
        for module, choice in self.formats.items():
            first, other = seen.setdefault(self._unit(module), (module, choice))
            if other is not choice:
                raise ConfigError(
                    f"{first} would be {_word(other)} and {module} {_word(choice)}, but engines run them as one layer:"
                    " give them the same format"
                )

    def _leave_misfits(self, shapes: dict[str, tuple[int, ...]]) -> None:
        units: dict[str, list[str]] = {}
        for module in self.formats:
            units.setdefault(self._unit(module), []).append(module)
        kinds: dict[tuple[str, tuple[int, ...]], int] = {}
        for members in units.values():
            misfit = next((m for m in members if not _fits(shapes[m], self.formats[m])), None)
            if misfit is not None:
                kind = (misfit.partition("layers.")[2].partition(".")[2] or misfit, shapes[misfit])
                kinds[kind] = kinds.get(kind, 0) + 1
                for module in members:
                    self.formats[module] = None
        for (name, shape), count in kinds.items():
            self.notes.append(
                f"{name} [{shape[0]}, {shape[1]}] and what engines fuse with it stay as they are in {count} layers: FP8"
                f" blocks need multiples of {fp8.BLOCK}, NVFP4 needs columns in multiples of {nvfp4.BLOCK}"
            )

    def quantization_config(self) -> dict[str, Any]:
        """The `quantization_config` that says all this: one format where that is enough, else every layer's."""
        present = {choice for choice in self.formats.values() if choice is not None}
        ignore = self._ignored()
        if present == {Format.NVFP4}:
            return modelopt_config(ignore + self._other_trees(), __version__)
        if present == {Format.FP8} and self.formats.get("lm_head") is None:
            return fp8_config(ignore + self._other_modules())
        layers = {self.stored(_short(m)): choice for m, choice in self.formats.items() if choice is not None}
        return mixed_config(layers, ignore + self._other_trees(), __version__)

    def _ignored(self) -> list[str]:
        found: dict[str, None] = {}
        for spec in language_tensors(self.config):
            if spec.role is Role.ROUTER or (spec.role is Role.LINEAR and self.formats[spec.module] is None):
                found[self.stored(_short(spec.module))] = None
        for number, kind in enumerate(self.config.layer_types):
            if kind == LINEAR:
                found[self.stored(f"model.layers.{number}.linear_attn.conv1d")] = None
        return list(found)

    def _other_trees(self) -> list[str]:
        """One pattern for each part beside the language model.

        vLLM renames what begins with `model.visual.`, dot included: it makes such a name of a pattern with a star, not
        of the bare module.
        """
        return [f"{prefix[:-1]}*" for prefix in IGNORED_PREFIXES if any(n.startswith(prefix) for n in self.others)]

    def _other_modules(self) -> list[str]:
        """Every linear layer beside the language model: vLLM's FP8 list holds whole names only."""
        names = (name for name, shape in self.others.items() if EXPERTS in name or len(shape) == 2)
        return list(dict.fromkeys(_short(name.removesuffix(".weight")) for name in names))

    def stored(self, module: str) -> str:
        """The name of a text-only checkpoint's module or tensor in this checkpoint."""
        if self.config.multimodal and module.startswith("model."):
            return LANGUAGE + module.removeprefix("model.")
        return module

    def mixed(self) -> bool:
        """Whether the config is one of ModelOpt's MIXED_PRECISION."""
        return self.quantization_config().get("quant_algo") == "MIXED_PRECISION"


def _short(module: str) -> str:
    """All experts of a layer under one name."""
    return module.partition(EXPERTS)[0] + ".experts" if EXPERTS in module else module


def _word(choice: Format | None) -> str:
    return "kept" if choice is None else choice.value


def _fits(shape: tuple[int, ...], choice: Format | None) -> bool:
    if choice is Format.FP8:
        return shape[0] % fp8.BLOCK == 0 and shape[1] % fp8.BLOCK == 0
    return choice is None or shape[1] % nvfp4.BLOCK == 0


def linear_specs(config: ModelConfig) -> Iterable[TensorSpec]:
    """The tensors that can be quantised."""
    return (spec for spec in language_tensors(config) if spec.role is Role.LINEAR)
