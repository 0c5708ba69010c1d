"""The least time that a pass can take on a card: its bytes at the copy rate or its arithmetic at the matrix rate.

The method is the roofline: a pass reads every weight once, each sequence's recurrent state once and writes it once, and
the keys and values of its context once; it multiplies every token with the weights that it meets. Whichever takes
longer is the floor. Activations, launches and everything else that a program could hide are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkinfer.models.config import ModelConfig

WEIGHT_BYTES = {"nvfp4": 0.5 + 1 / 16, "fp8": 1.0, "bf16": 2.0}
"""Bytes of one weight with its block scales."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What one card was measured to do: bytes per second copied, operations per second of its matrix products."""

    bytes_s: float
    operations_s: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """Bytes of one element of what is stored: linear weights, output matrix, KV cache, recurrent state."""

    weight: float
    head: float = 2.0
    kv: float = 2.0
    state: float = 4.0


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass holds: new tokens, sequences whose states move, tokens of cache read, pairs of query and key, rows
    that sample."""

    tokens: int
    sequences: int
    context: int
    pairs: int
    sampled: int


class Floor:
    """Floors of one model. Dimensions as in `ModelConfig`; results are seconds."""

    def __init__(self, config: ModelConfig, recipe: Recipe, machine: Machine) -> None:
        self._config, self._recipe, self._machine = config, recipe, machine
        c = config
        value = c.linear_value_heads * c.linear_value_dim
        linear = c.hidden_size * (c.conv_channels + 2 * value)
        # Gates of Gated DeltaNet and the router stay in 16 bits.
        small = c.num_linear_layers * 2 * c.linear_value_heads * c.hidden_size
        attention = c.hidden_size * c.head_dim * (3 * c.num_heads + 2 * c.num_kv_heads)
        every = c.num_linear_layers * linear + c.num_full_layers * attention
        expert = 0
        if c.num_experts:
            small += c.num_layers * c.num_experts * c.hidden_size
            every += c.num_layers * 3 * c.hidden_size * c.shared_intermediate_size
            expert = 3 * c.hidden_size * c.moe_intermediate_size
        else:
            every += c.num_layers * 3 * c.hidden_size * c.intermediate_size
        self._every, self._small, self._expert = every, small, expert
        self._head = c.vocab_size * c.hidden_size
        self._state = c.num_linear_layers * c.linear_value_heads * c.linear_key_dim * c.linear_value_dim
        self._kv_token = c.num_full_layers * 2 * c.num_kv_heads * c.head_dim

    def bytes(self, work: Work) -> float:
        """Bytes that a pass reads and writes at least. Experts touched: as many as a router without bias expects."""
        c, recipe = self._config, self._recipe
        size = self._every * recipe.weight + self._small * 2
        if c.num_experts:
            touched = c.num_experts * (1 - (1 - c.experts_per_token / c.num_experts) ** work.tokens)
            size += c.num_layers * touched * self._expert * recipe.weight
        size += self._head * recipe.head if work.sampled else 0
        size += 2 * work.sequences * self._state * recipe.state
        return size + (work.context + work.tokens) * self._kv_token * recipe.kv

    def operations(self, work: Work) -> float:
        """Multiplications and additions of a pass."""
        c = self._config
        weights = self._every + self._small + c.num_layers * c.experts_per_token * self._expert
        state = 3 * self._state  # decay, read and update of the state for a token
        scores = 2 * c.num_full_layers * c.num_heads * c.head_dim
        return 2.0 * (work.tokens * (weights + state) + work.sampled * self._head + work.pairs * scores)

    def seconds(self, work: Work) -> float:
        """The longer of the two."""
        return max(self.bytes(work) / self._machine.bytes_s, self.operations(work) / self._machine.operations_s)
