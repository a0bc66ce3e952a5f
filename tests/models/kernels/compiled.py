"""Registers, shared memory and spills of the kernels, compiled without a device.

    python -m tests.models.kernels.compiled

Triton compiles for a target by its name; ptxas and cuobjdump come with it.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilth.models.kernels import linear_cross_entropy as head
from tilth.models.kernels import rope_cache, sampler
from tilth.plan.kernels import head_stages

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MEMORY = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "gfx942": 64}
"""KB of shared memory that a program may have."""
POINTERS = {"hidden": "*bf16", "weight": "*bf16", "grad": "*bf16", "targets": "*i64", "scale": "fp32"}
POINTERS |= dict.fromkeys(("parts", "kept", "joined", "logp", "uniform", "top_p", "min_p", "picked"), "*fp32")
POINTERS |= dict.fromkeys(("every", "query_norm", "key_norm", "cos", "sin", "queries", "keys", "values"), "*bf16") | {
    "slots": "*i64",
    "eps": "fp32",
}
POINTERS |= {"greedy": "*i1", "top_k": "*i64", "tokens": "*i64"}
ALIGNED = {"d", "v", "width"}
"""Numbers that are multiples of 16, as Triton finds out when it is called."""
TILES = head.SIZES
OF_TILES = {"ROWS": TILES.rows, "COLUMNS": TILES.columns, "INNER": TILES.inner, "EVEN": True}
KERNELS = {
    "parts of the vocabulary": (head._part_kernel, {**OF_TILES, "WHOLE": True, "SPAN": TILES.span}),
    "parts of the vocabulary, d not a multiple of 64": (
        head._part_kernel, {**OF_TILES, "WHOLE": True, "SPAN": TILES.span, "EVEN": False},
    ),
    "join": (head._join_kernel, {"ROWS": 128}),
    "gradient of logits": (head._gradient_kernel, {**OF_TILES, "ENTROPY": False}),
    "gradient of logits, with entropy": (head._gradient_kernel, {**OF_TILES, "ENTROPY": True}),
    **{
        f"{name}rope and pages, 32 and 8 heads of 128": (
            rope_cache._heads_kernel,
            {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "PADDED": 64, "NORM": bool(name), "SPAN": rope_cache.SPAN},
        )
        for name in ("norms of heads, ", "")
    },
    "sampler": (sampler._choice_kernel, {"FILTERED": False, "BLOCK": sampler.BLOCK}),
    "sampler, filters": (sampler._choice_kernel, {"FILTERED": True, "BLOCK": sampler.BLOCK}),
}  # fmt: skip


class Resources(NamedTuple):
    """What a thread or a program of a kernel takes: 32-bit registers, bytes of shared memory, of spilled registers."""

    registers: int
    shared: int
    spilled: int


def compile_for(target: str, kernel, constants, **options) -> Resources:
    """Compile a kernel for a target and read its resources."""
    names = kernel.arg_names
    if "BLOCK" in constants:
        options = {"num_warps": sampler.WARPS} | options
    if "SPAN" in constants and "HEADS" in constants:
        options = {"num_warps": rope_cache.WARPS} | options
    if "COLUMNS" in constants:
        options = {"num_warps": TILES.warps, "num_stages": head_stages(MEMORY[target] << 10)} | options
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    aligned = {i for i, name in enumerate(names) if signature[name].startswith("*") or name in ALIGNED}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    built = triton.compile(source, target=TARGETS[target], options=options)
    shared = built.metadata.shared
    if target.startswith("gfx"):
        text = built.asm["amdgcn"]
        registers, vector, scalar = (
            int(re.search(rf"\.{name}: +(\d+)", text)[1])
            for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        )
        return Resources(registers, shared, 4 * (vector + scalar))
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(built.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        said = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said))
    return Resources(int(numbers["REG"]), shared, int(numbers["STACK"]) + int(numbers["LOCAL"]))


def main() -> None:
    print("| kernel | " + " | ".join(TARGETS) + " |\n|---|" + "---|" * len(TARGETS))
    for name, (kernel, constants) in KERNELS.items():
        cells = [compile_for(target, kernel, constants) for target in TARGETS]
        print(f"| {name} | " + " | ".join(f"{a}, {b / 1024:.3g} KB, {c}" for a, b, c in cells) + " |")


if __name__ == "__main__":
    main()
