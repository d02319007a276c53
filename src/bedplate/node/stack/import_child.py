"""The import probe: import one module, say what happened, and find out from the loader what the package
hides.

Runs in the interpreter of the generation through child.py; uses the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

CHAIN_LIMIT = 20  # exceptions of a chain
TEXT_LIMIT = 8000  # characters of one exception
FILE_LIMIT = 200  # extension files that the loader is asked about

# Libraries whose real path tells whether the stack runs on its own files. A hash may stand in a name that a
# wheel brings for itself (libcudart-9335f6a2.so.12).
LIBRARIES = re.compile(
    r"lib(?:c10|c10_cuda|torch|torch_cpu|torch_cuda|torch_python|nccl|cuda|nvidia-ml"
    r"|cudart|cublas|cublasLt|cudnn|cufft|curand|cusolver|cusparse|nvrtc|nvJitLink|nvshmem_host)"
    r"(?:-[0-9a-f]{8,})?\.so(?:\.[\d.]+)?$"
)


def describe(error: BaseException) -> list[dict[str, Any]]:
    """Return the exception and what it came from, outermost first: type, text, missing (a module's name),
    link.

    link: how the item before came from it, "cause" (raise ... from) or "context" (raised while it was
    handled).
    """
    chain: list[dict[str, Any]] = []
    current: BaseException | None = error
    link = ""
    while current is not None and len(chain) < CHAIN_LIMIT:
        try:
            text = str(current)
        except Exception as broken:  # noqa: BLE001  an exception that cannot be shown is still a result
            text = f"(its text cannot be had: {type(broken).__name__})"
        missing = current.name if isinstance(current, ModuleNotFoundError) else None
        kind = type(current).__name__
        chain.append({"type": kind, "text": text[:TEXT_LIMIT], "missing": missing, "link": link})
        link = "cause" if current.__cause__ else "context"
        current = current.__cause__ or current.__context__
    return chain


def versions(module: str) -> dict[str, str]:
    """Return the versions of the distributions that own the module's top-level package, and of torch.

    They come from the installed metadata, so they are there also when nothing can be imported.
    """
    top = module.partition(".")[0]
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        # RECORD and not top_level.txt, which newer build tools leave out.
        owns = name == "torch" or any(path.parts[0] in (top, f"{top}.py") for path in distribution.files or ())
        if owns:
            found[name] = distribution.version
    return found


def loaded_libraries() -> dict[str, list[str]]:
    """Return {file name: real paths} of the mapped libraries that ``LIBRARIES`` names."""
    found: dict[str, set[str]] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as stream:
        for line in stream:
            path = line.rstrip("\n").partition("/")[2]
            if path.endswith(" (deleted)"):  # replaced under the running process; proc_pid_maps(5)
                path = path[: -len(" (deleted)")]
            name = os.path.basename(path)
            if LIBRARIES.match(name):
                found.setdefault(name, set()).add(os.path.realpath("/" + path))
    return {name: sorted(paths) for name, paths in sorted(found.items())}


def nccl_version(libraries: dict[str, list[str]]) -> int | None:
    """Return what ncclGetVersion of the loaded NCCL says, such as 22705 for 2.27.5; None without an answer."""
    for name, paths in libraries.items():
        if name.startswith("libnccl"):
            number = ctypes.c_int()
            # It is loaded already: this opens no file, and runs no initialiser.
            if ctypes.CDLL(paths[0]).ncclGetVersion(ctypes.byref(number)) == 0:
                return number.value
    return None


def architectures(torch: Any) -> list[str] | None:
    """Return what torch was built for, such as ["sm_90", "sm_120", "compute_120"]; None when it does not tell.

    torch.cuda.get_arch_list() gives the same list, but nothing on a machine without a GPU.
    """
    flags = getattr(getattr(torch, "_C", None), "_cuda_getArchFlags", None)
    if flags is not None:
        return str(flags() or "").split()
    listed = getattr(getattr(torch, "cuda", None), "get_arch_list", None)
    return None if listed is None else [str(name) for name in listed()]


def package_files(module: str) -> list[str]:
    """Return the shared objects in the module's top-level package, without importing it."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    files = []
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for directory, _, names in os.walk(place):
            files += [os.path.join(directory, name) for name in names if name.endswith(".so") or ".so." in name]
    return sorted(files)[:FILE_LIMIT]


def ask_loader(path: str) -> str:
    """Load a shared object in a forked process, all symbols at once; return the loader's error, "" for none.

    In a process of its own, since its initialisers may end it; then the text says by which signal.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            os.write(write_end, str(error).encode()[:TEXT_LIMIT])
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as stream:
        text = stream.read().decode("utf-8", "replace")
    _, status = os.waitpid(child, 0)
    return text or (f"loading it died by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "")


def main(config: dict[str, Any], answer: Callable[[Any], None], stage: Callable[[str, str], None]) -> None:
    """Import ``config["module"]`` and answer {error, versions, libraries, version, file, cuda, arch_list, nccl,
    loader, seconds}.

    error: the chain of ``describe``, empty on success. cuda, arch_list, nccl: of the torch and the NCCL that the
    import brought with it, None without them. loader: [{file, error}] where the loader was asked,
    which it is for every failure with ``config["ask_loader"]`` true. With that, nothing is imported but
    torch.
    """
    name = config["module"]
    result: dict[str, Any] = {"error": [], "loader": [], "versions": versions(name)}
    if config["ask_loader"]:
        if name.partition(".")[0] != "torch":
            stage("import", "importing torch before the loader is asked")
            # The extensions of a package find torch's libraries only when torch has loaded them. If torch
            # cannot be imported, their errors say so.
            with contextlib.suppress(Exception):
                importlib.import_module("torch")
        for path in package_files(name):
            stage("import", f"asking the loader about {path}")
            error = ask_loader(path)
            if error:
                result["loader"].append({"file": path, "error": error})
                answer(result)
        answer(result)
        return
    stage("import", f"importing {name}")
    began = time.monotonic()
    try:
        module = importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt of a package, too
        result["error"] = describe(error)
    else:
        result.update(version=str(getattr(module, "__version__", "")), file=getattr(module, "__file__", None))
    result["seconds"] = round(time.monotonic() - began, 3)
    result["libraries"] = loaded_libraries()
    torch = sys.modules.get("torch")
    if torch is not None and not result["error"]:
        result["cuda"] = getattr(getattr(torch, "version", None), "cuda", None)
        # What follows runs code of the stack: what is known already must not be lost with it.
        answer(result)
        stage("import", "asking torch and NCCL what they are")
        result["arch_list"] = architectures(torch)
        result["nccl"] = nccl_version(result["libraries"])
    answer(result)
