"""Small shared objects for the ABI tests, compiled on the spot; tests that need them skip without a C compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CC = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(CC is None, reason="no C compiler")

CHECK_INT = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"
CHECK_UNSIGNED = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"


def build(path: Path, exports: list[str], needs: list[str], *flags: str, weak: list[str] | None = None) -> Path:
    """Compile a shared object at `path` that exports and needs the given (mangled) names; `flags` go to the linker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f'void e{n}(void) __asm__("{name}"); void e{n}(void) {{}}' for n, name in enumerate(exports)]
    for n, name in enumerate(needs):
        lines.append(f'extern void n{n}(void) __asm__("{name}"); void (*p{n})(void) = n{n};')
    for n, name in enumerate(weak or []):
        lines.append(f'extern void w{n}(void) __asm__("{name}") __attribute__((weak)); void (*q{n})(void) = w{n};')
    source = path.with_suffix(".c")
    source.write_text("\n".join(lines) + "\n")
    command = [str(CC), "-shared", "-fPIC", "-o", str(path), str(source), *flags]
    subprocess.run(command, check=True, capture_output=True)
    source.unlink()
    return path


def environment(root: Path, check: str = CHECK_INT, version: str = "2.9.1") -> Path:
    """Build a virtual environment's shape with a stand-in torch and an extension; return its site-packages."""
    site = root / "lib" / "python3.11" / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = '12.8'\n")
    lib = site / "torch" / "lib"
    build(lib / "libc10.so", ["_ZN3c106SymInt3fooEv"], [], "-Wl,-soname,libc10.so")
    build(lib / "libc10_cuda.so", [check], [], "-Wl,-soname,libc10_cuda.so", f"-L{lib}", "-Wl,--no-as-needed", "-lc10")
    # The driver's library is there to link with, and gone when the environment is checked.
    driver = build(root / "driver" / "libcuda.so.1", ["cuInit"], [], "-Wl,-soname,libcuda.so.1")
    build(
        site / "sgl_kernel" / "common_ops.abi3.so",
        ["PyInit_common_ops"],
        [CHECK_INT, "cuInit"],
        f"-L{lib}",
        "-Wl,--no-as-needed",
        "-lc10",
        "-lc10_cuda",
        f"-L{driver.parent}",
        "-l:libcuda.so.1",
    )
    driver.unlink()
    info = site / "sgl_kernel-0.3.21.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("sgl_kernel/common_ops.abi3.so,sha256=x,1\n")
    return site
