"""What a CUDA toolkit release consists of, as far as a check needs it: the versions that tell releases apart.

A release is named by NVIDIA's own number, such as 13.0.1. Its parts carry other numbers, and some of them do not move
between releases: nvcc 13.0.88 belongs to 13.0.1 and to 13.0.2, cudart and cublas tell them apart.

Sources: NVIDIA's CUDA Toolkit release notes, tables "Component Versions" and "Toolkit Driver Version"; the host
compilers from the installation guides of 12.8 and 13.0 (the upper bound is also in the toolkit's own
``include/crt/host_config.h``, which is what counts where it can be read).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The names are the extras of NVIDIA's package cuda-toolkit, plus "cuobjdump", "nvdisasm" and "driver-dev", which exist
# as system packages only.
COMPONENTS: Mapping[str, Mapping[str, str]] = {
    "12.8.1": {
        "cccl": "12.8.90",
        "crt": "12.8.93",
        "cublas": "12.8.4.1",
        "cudart": "12.8.90",
        "cufft": "11.3.3.83",
        "cufile": "1.13.1.3",
        "cuobjdump": "12.8.90",
        "cupti": "12.8.90",
        "curand": "10.3.9.90",
        "cusolver": "11.7.3.90",
        "cusparse": "12.5.8.93",
        "cuxxfilt": "12.8.90",
        "driver-dev": "12.8.90",
        "npp": "12.3.3.100",
        "nvcc": "12.8.93",
        "nvdisasm": "12.8.90",
        "nvfatbin": "12.8.90",
        "nvjitlink": "12.8.93",
        "nvjpeg": "12.3.5.92",
        "nvml": "12.8.90",
        "nvrtc": "12.8.93",
        "nvtx": "12.8.90",
        "nvvm": "12.8.93",
        "opencl": "12.8.90",
        "profiler": "12.8.90",
        "sanitizer": "12.8.93",
    },
    "13.0.1": {
        "cccl": "13.0.85",
        "crt": "13.0.88",
        "cublas": "13.0.2.14",
        "cudart": "13.0.88",
        "cufft": "12.0.0.61",
        "cufile": "1.15.1.6",
        "culibos": "13.0.85",
        "cuobjdump": "13.0.85",
        "cupti": "13.0.85",
        "curand": "10.4.0.35",
        "cusolver": "12.0.4.66",
        "cusparse": "12.6.3.3",
        "cuxxfilt": "13.0.85",
        "driver-dev": "13.0.88",
        "npp": "13.0.1.2",
        "nvcc": "13.0.88",
        "nvdisasm": "13.0.85",
        "nvfatbin": "13.0.85",
        "nvjitlink": "13.0.88",
        "nvjpeg": "13.0.1.86",
        "nvml": "13.0.87",
        "nvptxcompiler": "13.0.88",
        "nvrtc": "13.0.88",
        "nvtx": "13.0.85",
        "nvvm": "13.0.88",
        "opencl": "13.0.85",
        "profiler": "13.0.85",
        "sanitizer": "13.0.85",
    },
    "13.0.2": {
        "cccl": "13.0.85",
        "crt": "13.0.88",
        "cublas": "13.1.0.3",
        "cudart": "13.0.96",
        "cufft": "12.0.0.61",
        "cufile": "1.15.1.6",
        "culibos": "13.0.85",
        "cuobjdump": "13.0.85",
        "cupti": "13.0.85",
        "curand": "10.4.0.35",
        "cusolver": "12.0.4.66",
        "cusparse": "12.6.3.3",
        "cuxxfilt": "13.0.85",
        "driver-dev": "13.0.96",
        "npp": "13.0.1.2",
        "nvcc": "13.0.88",
        "nvdisasm": "13.0.85",
        "nvfatbin": "13.0.85",
        "nvjitlink": "13.0.88",
        "nvjpeg": "13.0.1.86",
        "nvml": "13.0.87",
        "nvptxcompiler": "13.0.88",
        "nvrtc": "13.0.88",
        "nvtx": "13.0.85",
        "nvvm": "13.0.88",
        "opencl": "13.0.85",
        "profiler": "13.0.85",
        "sanitizer": "13.0.85",
    },
}

# Where a part is called otherwise in NVIDIA's version.json than "cuda_<component>".
VERSION_JSON_KEYS: Mapping[str, str] = {
    "cublas": "libcublas",
    "cufft": "libcufft",
    "cufile": "libcufile",
    "curand": "libcurand",
    "cusolver": "libcusolver",
    "cusparse": "libcusparse",
    "npp": "libnpp",
    "nvfatbin": "libnvfatbin",
    "nvjitlink": "libnvjitlink",
    "nvjpeg": "libnvjpeg",
    "nvml": "cuda_nvml_dev",
    "nvptxcompiler": "libnvptxcompiler",
    "nvvm": "libnvvm",
    "profiler": "cuda_profiler_api",
    "sanitizer": "cuda_sanitizer_api",
}


# The apt packages that bring a component; {series} is such as 13-0. Never a meta package: cuda-toolkit-13-0 takes
# the newest of each part, cuda-13-0 and cuda-runtime-13-0 bring a driver. Names and versions as in NVIDIA's repository
# for 12.8 and 13.0 (docs/toolkit.md says where each was seen).
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "cccl": ("cuda-cccl-{series}",),
    "crt": ("cuda-crt-{series}",),
    "cublas": ("libcublas-{series}", "libcublas-dev-{series}"),
    "cudart": ("cuda-cudart-{series}", "cuda-cudart-dev-{series}", "cuda-toolkit-{series}-config-common"),
    "cufft": ("libcufft-{series}", "libcufft-dev-{series}"),
    "cufile": ("libcufile-{series}", "libcufile-dev-{series}"),
    "culibos": ("cuda-culibos-dev-{series}",),
    "cuobjdump": ("cuda-cuobjdump-{series}",),
    "cupti": ("cuda-cupti-{series}", "cuda-cupti-dev-{series}"),
    "curand": ("libcurand-{series}", "libcurand-dev-{series}"),
    "cusolver": ("libcusolver-{series}", "libcusolver-dev-{series}"),
    "cusparse": ("libcusparse-{series}", "libcusparse-dev-{series}"),
    "cuxxfilt": ("cuda-cuxxfilt-{series}",),
    "driver-dev": ("cuda-driver-dev-{series}",),
    "npp": ("libnpp-{series}", "libnpp-dev-{series}"),
    "nvcc": ("cuda-nvcc-{series}",),
    "nvdisasm": ("cuda-nvdisasm-{series}",),
    "nvfatbin": ("libnvfatbin-{series}", "libnvfatbin-dev-{series}"),
    "nvjitlink": ("libnvjitlink-{series}", "libnvjitlink-dev-{series}"),
    "nvjpeg": ("libnvjpeg-{series}", "libnvjpeg-dev-{series}"),
    "nvml": ("cuda-nvml-dev-{series}",),
    "nvptxcompiler": ("libnvptxcompiler-{series}",),
    "nvrtc": ("cuda-nvrtc-{series}", "cuda-nvrtc-dev-{series}"),
    "nvtx": ("cuda-nvtx-{series}",),
    "nvvm": ("libnvvm-{series}",),
    "opencl": ("cuda-opencl-{series}", "cuda-opencl-dev-{series}"),
    "profiler": ("cuda-profiler-api-{series}",),
    "sanitizer": ("cuda-sanitizer-{series}",),
}
# Before CUDA 13 libnvvm had another name.
PACKAGES_12: Mapping[str, tuple[str, ...]] = {"nvvm": ("cuda-nvvm-{series}",)}

# What a component does not work without: the compiler includes headers of cudart, which include those of cccl.
NEEDS: Mapping[str, Sequence[str]] = {
    "cufft": ("nvjitlink",),
    "cusolver": ("cublas", "cusparse", "nvjitlink"),
    "cusparse": ("nvjitlink",),
    "nvcc": ("cccl", "crt", "cudart", "nvvm"),
}

# The compiler's packages depend on these parts; they come along, and are pinned as well.
PACKAGE_NEEDS: Mapping[str, Sequence[str]] = {
    "cudart": ("cccl", "culibos", "driver-dev"),
    "nvcc": ("crt", "nvptxcompiler", "nvvm"),
}


class Support(NamedTuple):
    """The oldest and the newest major version of gcc that nvcc takes, and the oldest driver branch."""

    gcc: tuple[int, int]
    driver: int


# By major and minor version, the newest first: another version takes the entry of the next older one.
SUPPORT: Mapping[tuple[int, int], Support] = {(13, 0): Support((6, 15), 580), (12, 8): Support((6, 14), 525)}


def version_json_key(component: str) -> str:
    """Return the key of a component in version.json."""
    return VERSION_JSON_KEYS.get(component, f"cuda_{component.replace('-', '_')}")


def short(version: str) -> str:
    """Return major and minor of a version: "13.0" of "13.0.1"."""
    return ".".join(version.split(".")[:2])


def support(version: str) -> Support:
    """Return what a release supports; for one that is not in the table, what the next older one does."""
    major, minor = (int(part) for part in short(version).split("."))
    return next((found for key, found in SUPPORT.items() if (major, minor) >= key), SUPPORT[min(SUPPORT)])


def lacking(version: str, source: str) -> set[str]:
    """Return the components that a source does not bring.

    The wheels have no cuobjdump, nvdisasm and stubs of the driver's libraries; those of CUDA 12 have no nvcc either:
    what PyPI calls nvidia-cuda-nvcc-cu12 is ptxas, libnvvm and headers.
    """
    if source != "wheels":
        return set()
    return {"cuobjdump", "driver-dev", "nvdisasm"} | ({"nvcc"} if version.startswith("12.") else set())


def closure(components: Sequence[str], needs: Mapping[str, Sequence[str]] = NEEDS) -> list[str]:
    """Return components with all that they need, sorted."""
    found: set[str] = set()
    todo = list(components)
    while todo:
        component = todo.pop()
        if component not in found:
            found.add(component)
            todo += needs.get(component, ())
    return sorted(found)


def packages(version: str, components: Sequence[str]) -> dict[str, str]:
    """Return {package: upstream version} of every leaf that apt must install for some components; none means all.

    Raises ValueError: a release that is not in the table, a component that it does not have.
    """
    known = COMPONENTS.get(version)
    if known is None:
        raise ValueError(
            f"CUDA {version} is not one of the releases that Bedplate pins: {', '.join(sorted(COMPONENTS))}"
        )
    unknown = sorted(set(components) - set(known))
    if unknown:
        raise ValueError(f"CUDA {version} has no component {unknown[0]}; it has {', '.join(sorted(known))}")
    needed = closure(closure(components or sorted(known)), PACKAGE_NEEDS)
    names = {**PACKAGES, **(PACKAGES_12 if version.startswith("12.") else {})}
    series = short(version).replace(".", "-")
    return {
        name.format(series=series): known[component]
        for component in needed
        if component in known
        for name in names[component]
    }


def expected_components(version: str, source: str, names: Sequence[str]) -> dict[str, str]:
    """Return {component: version or ""} that a toolkit must have; "" where the release is not in the table.

    names: those of the profile; none means all that the source brings. Of a toolkit that is not Bedplate's only the
    compiler and the runtime are asked for then.
    """
    known = COMPONENTS.get(version, {})
    if not names:
        names = ["cudart", "nvcc"] if source == "none" or not known else sorted(set(known) - lacking(version, source))
    return {name: known.get(name, "") for name in closure(names)}
