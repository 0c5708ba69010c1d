"""Compile Triton kernels for a GPU that this machine need not have, and report what the code uses.

    from aot import KernelBuild, compile_kernels      # tests/kernels/conftest.py puts this folder on the path
    builds = [KernelBuild("sparkinfer_kernels.rms_norm.norm:rms_norm_kernel",
                          signature={"x_ptr": "*bf16", "n": "i32", "eps": "fp32"},
                          constexprs={"BLOCK": 1024}, arch=90, num_warps=8)]
    for used in compile_kernels(builds):
        used.check(shared=SHARED_LIMIT[used.build.arch], spills=0)

The compiler runs in one child process for the whole list: the calling one usually interprets kernels
(TRITON_INTERPRET=1), which replaces the very functions that compiling needs. As a command:
`python tests/kernels/aot.py MODULE:NAME '{"signature": {...}, "constexprs": {...}}' [ARCH ...]`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SHARED_LIMIT = {90: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that one block can use, by architecture."""

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class KernelBuild:
    """One kernel with everything that fixes its code.

    Attributes:
        kernel: "module:name" of a function decorated with `triton.jit` (or `gluon.jit`).
        signature: Triton type of every argument that is no constexpr, e.g. "*bf16", "*u8", "i32", "fp32".
        constexprs: value of every constexpr argument (numbers, booleans, None, strings such as "bf16" for a `tl.dtype`
            are given as "dtype:bf16").
        arch: compute capability times ten: 90 or 120.
        unaligned: pointer arguments not known to be divisible by 16 bytes; all others are taken to be.
        divisible: integer arguments known to be divisible by 16.
        sass: also count the instructions of the disassembly (a second or two more).
    """

    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    arch: int = 90
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    unaligned: tuple[str, ...] = ()
    divisible: tuple[str, ...] = ()
    sass: bool = False


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses: per block `shared` bytes, per thread `registers` and `spills`.

    `spills` are bytes of local memory on the stack (spilled registers and arrays indexed at run time), `opcodes` the
    count of each instruction, e.g. {"LDG.E.128": 8, "HGMMA": 4} (empty unless `sass` was asked for).
    """

    build: KernelBuild
    shared: int
    registers: int
    spills: int
    opcodes: dict[str, int]

    def check(self, shared: int, spills: int = 0) -> None:
        """AssertionError with the numbers if the kernel needs more than that."""
        what = f"{self.build.kernel} {self.build.constexprs} for sm_{self.build.arch}"
        assert self.shared <= shared, f"{what} needs {self.shared} bytes of shared memory, {shared} are there"
        assert self.spills <= spills, f"{what} spills {self.spills} bytes ({self.registers} registers), budget {spills}"

    def count(self, prefix: str) -> int:
        """Number of instructions whose name begins with `prefix`."""
        return sum(number for name, number in self.opcodes.items() if name.startswith(prefix))


def compile_kernels(builds: Sequence[KernelBuild], timeout: float = 600.0) -> list[Resources]:
    """Compile all `builds`; raises AssertionError with the compiler's message for the first that fails."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = [str(ROOT / "kernels"), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([asdict(build) for build in builds]),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, f"compilation failed:\n{done.stderr[-6000:]}"
    results = json.loads(done.stdout.splitlines()[-1])
    return [Resources(build, **result) for build, result in zip(builds, results, strict=True)]


def compile_kernel(kernel: str, signature: dict[str, str], **options: Any) -> Resources:
    """One kernel; `options` as in `KernelBuild`."""
    return compile_kernels([KernelBuild(kernel, signature, **options)])[0]


# What follows runs in the child process, which does not interpret.


def _constant(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("dtype:"):
        import triton.language as tl

        return tl.dtype(value.removeprefix("dtype:"))
    return value


def _compile(build: dict[str, Any]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = build["kernel"].split(":")
    function = getattr(importlib.import_module(module), name)
    while not hasattr(function, "arg_names"):  # autotuners and heuristics wrap the function
        function = function.fn
    constexprs = {key: _constant(value) for key, value in build["constexprs"].items()}
    given = {**build["signature"], **dict.fromkeys(constexprs, "constexpr")}
    missing = [arg for arg in function.arg_names if arg not in given]
    unknown = [arg for arg in given if arg not in function.arg_names]
    if missing or unknown:
        raise SystemExit(f"{build['kernel']}: arguments without a type {missing}, unknown arguments {unknown}")
    signature = {arg: given[arg] for arg in function.arg_names}
    aligned = [
        arg
        for arg, kind in signature.items()
        if (kind.startswith("*") and arg not in build["unaligned"]) or arg in build["divisible"]
    ]
    attrs = {(function.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in aligned}
    source_type: Any = ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    source = source_type(
        fn=function,
        signature=signature,
        constexprs={(function.arg_names.index(key),): value for key, value in constexprs.items()},
        attrs=attrs,
    )
    options = {"num_warps": build["num_warps"], "num_stages": build["num_stages"]}
    if build["maxnreg"]:
        options["maxnreg"] = build["maxnreg"]
    compiled = triton.compile(source, target=GPUTarget("cuda", build["arch"], 32), options=options)
    return {"shared": compiled.metadata.shared, **_inspect(compiled.asm["cubin"], build["sass"])}


def _inspect(cubin: bytes, sass: bool) -> dict[str, Any]:
    from triton.backends.nvidia import compiler

    tool = Path(compiler.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
        listing = subprocess.check_output([tool, "--dump-sass", file.name], text=True) if sass else ""
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    opcodes = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listing))
    return {
        "registers": numbers["REG"],
        "spills": max(numbers.get("STACK", 0), numbers.get("LOCAL", 0)),
        "opcodes": dict(opcodes),
    }


def _main(arguments: Iterable[str]) -> None:
    words = list(arguments)
    if not words:
        print(json.dumps([_compile(build) for build in json.load(sys.stdin)]))
        return
    kernel, options, *archs = words
    builds = [KernelBuild(kernel, arch=int(arch), sass=True, **json.loads(options)) for arch in archs or ("90", "120")]
    for used in compile_kernels(builds):
        print(f"sm_{used.build.arch}: {used.registers} registers, {used.spills} spilled bytes, {used.shared} shared")
        print("  ", ", ".join(f"{name} {number}" for name, number in Counter(used.opcodes).most_common(24)))


if __name__ == "__main__":
    _main(sys.argv[1:])
