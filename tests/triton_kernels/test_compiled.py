"""Every Triton kernel compiled ahead of time for three generations of GPUs: no spills, few registers, wide loads.

No GPU is needed: the compiler and `cuobjdump` come with Triton. What the interpreter cannot show is read here from
the machine code: stack bytes, registers, and how many bytes a thread loads at once.
"""

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KERNELS = Path(__file__).parents[2] / "triton_kernels"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MODULES = sorted(path.stem for path in KERNELS.glob("*_triton.py"))


def compiled_variants():
    """Of the kernel modules once more, under other names: the package's own are interpreted in these tests."""
    found = []
    for name in MODULES:
        spec = importlib.util.spec_from_file_location(f"compiled_{name}", KERNELS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.VARIANTS
    return found


VARIANTS = compiled_variants()


def compile_for(variant, capability):
    names = variant.kernel.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    source = ASTSource(variant.kernel, signature, constants, attributes)
    options = {"num_warps": variant.num_warps}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(cubin):
    """Registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout).groups()
    return int(registers), int(stack)


def test_every_kernel_module_lists_its_variants():
    kernels = {variant.kernel.__name__ for variant in VARIANTS}
    written = set()
    for name in MODULES:
        text = (KERNELS / f"{name}.py").read_text()
        written |= set(re.findall(r"@triton\.jit\ndef ([a-z]\w*)", text))
    assert kernels == written


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_it_compiles_without_stack_in_few_registers_and_with_16_byte_loads(variant, capability):
    kernel = compile_for(variant, capability)
    registers, stack = usage(kernel.asm["cubin"])
    assert stack == 0
    assert registers <= 96
    loads = re.findall(r"ld\.global\S*", kernel.asm["ptx"])
    wide = [load for load in loads if ".v4.b32" in load or ".v2.b64" in load]
    assert wide
    # The rest are the few numbers of a row or a segment; a block that was not wide would be eight and more.
    assert len(loads) - len(wide) <= 7
    assert not [load for load in loads if ".v" in load and load not in wide]


def test_narrow_gradients_wait_for_all_loads_of_their_block():
    """They overlay the logits: without the barrier a fast warp would write over what a slow one has not read."""
    narrow = [variant for variant in VARIANTS if variant.name.startswith("row_gradients bf16")]
    assert len(narrow) == 4
    for variant in narrow:
        ptx = compile_for(variant, 90).asm["ptx"]
        last_load, first_store = ptx.rindex("ld.global.v4"), ptx.index("st.global.v4")
        assert "bar.sync" in ptx[last_load:first_store]
