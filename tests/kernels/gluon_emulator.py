"""Run Gluon kernels as plain Python on the CPU: torch tensors for values, layouts ignored (the compiler checks those).

Triton's interpreter does not know Gluon. This one knows what the few-row products use. Asynchronous copies land when
they are waited for and poison their target until then, so that a kernel which reads a stage too early gets wrong
numbers; programs run one after another in the order that is asked for.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch


class Pointer:
    """A tensor of addresses within one flat buffer."""

    def __init__(self, buffer: torch.Tensor, offset: Any = 0) -> None:
        self.buffer, self.offset = buffer, torch.as_tensor(offset)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.buffer, self.offset + other)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.buffer.dtype)

    def read(self, mask: Any, other: Any) -> torch.Tensor:
        """Values where `mask`, `other` elsewhere; an access outside the buffer is an error."""
        offset, inside = torch.broadcast_tensors(self.offset, torch.as_tensor(True if mask is None else mask))
        self._check(offset, inside)
        values = self.buffer[torch.where(inside, offset, 0).long()]
        if values.dtype == torch.float8_e4m3fn:  # torch has no `where` for it
            return torch.where(inside, values.view(torch.uint8), 0).view(torch.float8_e4m3fn)
        return torch.where(inside, values, torch.as_tensor(other, dtype=self.buffer.dtype))

    def write(self, value: torch.Tensor, mask: Any) -> None:
        """Store where `mask`."""
        inside = torch.as_tensor(True if mask is None else mask)
        offset, inside, value = torch.broadcast_tensors(self.offset, inside, torch.as_tensor(value))
        self._check(offset, inside)
        self.buffer[offset[inside].long()] = value[inside].to(self.buffer.dtype)

    def _check(self, offset: torch.Tensor, inside: torch.Tensor) -> None:
        used = offset[inside]
        if used.numel() and not (int(used.min()) >= 0 and int(used.max()) < self.buffer.numel()):
            raise IndexError(f"access to {int(used.min())} .. {int(used.max())} of {self.buffer.numel()} elements")


class Stage:
    """A buffer in shared memory, or a part of it."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def load(self, _layout: Any) -> torch.Tensor:
        return self.values.clone()

    def slice(self, start: int, length: int, dim: int) -> Stage:
        return Stage(self.values.narrow(dim, start, length))

    def permute(self, order: list[int]) -> Stage:
        return Stage(self.values.permute(order))


class Shared(Stage):
    """One that a kernel allocates; it may have stages in its first dimension."""

    def __init__(self, dtype: torch.dtype, shape: list[int]) -> None:
        super().__init__(torch.empty(shape, dtype=dtype))

    def index(self, slot: Any) -> Stage:
        return Stage(self.values[int(slot)])


class Copies:
    """`async_copy` of Gluon."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self.open: list[tuple[torch.Tensor, torch.Tensor]] = []

    def async_copy_global_to_shared(self, stage: Stage, pointer: Pointer, mask: Any = None, **_: Any) -> None:
        self.open.append((stage.values, pointer.read(mask, 0)))
        stage.values.fill_(float("nan") if stage.values.is_floating_point() else 0x5A5A5A5A)

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for target, values in self.groups.pop(0):
                target.copy_(values)


def _language(program: tuple[int, int], grid: tuple[int, int], asm: dict[str, Callable[..., Any]]) -> Any:
    """Stands for `triton.experimental.gluon.language` within one program."""

    def layout(*_: Any, **__: Any) -> None:
        return None

    def atomic_add(pointer: Pointer, value: int, **_: Any) -> torch.Tensor:
        before = pointer.buffer[pointer.offset].clone()
        pointer.buffer[pointer.offset] += value
        return before

    def sum_of(x: torch.Tensor, axis: int) -> torch.Tensor:
        total = x.select(axis, 0).clone()
        for index in range(1, x.shape[axis]):
            total += x.select(axis, index)
        return total

    names = ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "SwizzledSharedLayout")
    return types.SimpleNamespace(
        **dict.fromkeys((*names, "DistributedLinearLayout"), layout),
        int32=torch.int32,
        int64=torch.int64,
        float32=torch.float32,
        bfloat16=torch.bfloat16,
        constexpr=layout,
        static_range=range,
        program_id=lambda axis: torch.tensor(program[axis], dtype=torch.int32),
        num_programs=lambda axis: torch.tensor(grid[axis], dtype=torch.int32),
        arange=lambda first, last, _layout: torch.arange(first, last, dtype=torch.int32),
        zeros=lambda shape, dtype, _layout: torch.zeros(shape, dtype=dtype),
        zeros_like=torch.zeros_like,
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        where=lambda c, a, b: torch.where(torch.as_tensor(c), torch.as_tensor(a), torch.as_tensor(b)),
        exp=torch.exp,
        sum=sum_of,
        join=lambda a, b: torch.stack([a, b], -1),
        split=lambda x: (x[..., 0], x[..., 1]),
        convert_layout=lambda x, *_, **__: x,
        load=lambda pointer, mask=None, other=0, **_: pointer.read(mask, other),
        store=lambda pointer, value, mask=None, **_: pointer.write(value, mask),
        atomic_add=atomic_add,
        thread_barrier=lambda: None,
        allocate_shared_memory=lambda dtype, shape, _layout: Shared(dtype, shape),
        inline_asm_elementwise=lambda text, _constraints, values, **_: asm[text](*values),
    )


def launch(
    kernel: Any,
    arguments: dict[str, Any],
    grid: tuple[int, int],
    asm: dict[Any, Callable[..., Any]],
    order: Callable[[Iterable[tuple[int, int]]], Iterable[tuple[int, int]]] = sorted,
) -> None:
    """Run all programs of a kernel.

    Args:
        kernel: decorated with `gluon.jit`, in a module of its own whose globals it uses.
        arguments: by name; flat tensors stand for pointers, ints for run-time integers, constexprs as they are (their
            names are in capitals of more than one letter).
        asm: what each piece of inline assembly computes.
        order: of the programs.
    """
    given = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            given[name] = Pointer(value)
        elif isinstance(value, int) and not (name.isupper() and len(name) > 1):
            given[name] = torch.tensor(value, dtype=torch.int32)
        else:
            given[name] = value
    # A Gluon value knows its layout under `type`, which is a method of torch tensors.
    with (
        mock.patch.object(torch.Tensor, "type", types.SimpleNamespace(layout=None)),
        mock.patch.object(torch.Tensor, "expand_dims", torch.Tensor.unsqueeze, create=True),
    ):
        for program in order([(i, j) for i in range(grid[0]) for j in range(grid[1])]):
            _bind(kernel.fn, _language(program, grid, asm), Copies(), {})(**given)


def _operand(given: Any) -> torch.Tensor:
    """Of a matrix instruction: in registers or in shared memory."""
    return (given.values if isinstance(given, Stage) else given).float()


def _bind(function: Any, language: Any, copies: Copies, known: dict[Any, Any]) -> Any:
    """The Python function of a kernel, with emulated globals; functions that it calls likewise."""
    if function in known:
        return known[function]
    space: dict[str, Any] = {}
    bound = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__)
    known[function] = bound
    for name, value in function.__globals__.items():
        if name == "gl":
            space[name] = language
        elif name == "async_copy":
            space[name] = copies
        elif name in ("gdc_wait", "gdc_launch_dependents", "fence_async_shared"):
            space[name] = lambda: None
        elif name == "warpgroup_mma":
            space[name] = lambda a, b, acc, **_: acc + _operand(a) @ _operand(b)
        elif name == "warpgroup_mma_wait":
            space[name] = lambda _outstanding, deps: deps[0]
        elif name == "mma_v2":
            space[name] = lambda a, b, acc: acc + a.float() @ b.float()
        elif hasattr(value, "arg_names") and hasattr(value, "fn"):
            space[name] = _bind(value.fn, language, copies, known)
        elif name.endswith("_layout"):
            space[name] = lambda *_: None
        else:
            space[name] = value
    return bound
