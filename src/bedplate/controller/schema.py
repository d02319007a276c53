"""What profile.yml and lock.yml may hold, and how a mistake in them is put into words."""

from __future__ import annotations

import re
import typing
from typing import Annotated, Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from bedplate.node.stack.operations import OPERATIONS

from .errors import BedplateError, near
from .wheels import parse_file_name
from .yamlfile import Location, YamlFile

# The glibc versions `uv pip compile --python-platform x86_64-manylinux_X_Y` knows (uv 0.13.9).
GLIBC_VERSIONS = ("2.17", "2.28", *(f"2.{minor}" for minor in range(31, 41)))


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=False)


def split_pin(pin: str) -> tuple[str, str]:
    """Return (canonical name, version) of an exact pin such as `torch==2.9.1+cu130`; ValueError otherwise."""
    try:
        requirement = Requirement(pin)
    except InvalidRequirement as error:
        raise ValueError(f"`{pin}` is not a requirement: write NAME==VERSION") from error
    pins = [item.version for item in requirement.specifier if item.operator == "=="]
    exact = len(requirement.specifier) == 1 and pins and not pins[0].endswith(".*")
    if requirement.url or requirement.marker or not exact:
        raise ValueError(f"`{pin}` is not an exact pin: write {requirement.name}==VERSION, nothing else")
    try:
        return canonicalize_name(requirement.name), str(Version(pins[0]))
    except InvalidVersion as error:  # pragma: no cover - packaging refuses these in Requirement already
        raise ValueError(f"`{pin}`: {error}") from error


def _exact_pin(value: str) -> str:
    split_pin(value)
    return value


def _wheel_file(value: str) -> str:
    parse_file_name(value)
    return value


def _unique(values: list[str]) -> list[str]:
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"given twice: {', '.join(twice)}")
    return values


def _known_glibc(value: str) -> str:
    if value not in GLIBC_VERSIONS:
        raise ValueError(f"`{value}` is not one of {', '.join(GLIBC_VERSIONS)}")
    return value


def _known_operation(value: str) -> str:
    if value not in OPERATIONS:
        raise ValueError(
            f"`{value}` is no operation{near(value, OPERATIONS) or '.'} Those there are: {', '.join(OPERATIONS)}"
        )
    return value


def _form(pattern: str, example: str) -> AfterValidator:
    """Return a validator for text of one form; its message shows an example in place of the expression."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"`{value}` does not have the right form, such as `{example}`")
        return value

    return AfterValidator(check)


Target = Annotated[str, _form(r"cp3\d{1,2}-(x86_64|aarch64)", "cp312-x86_64")]
Sha256 = Annotated[str, _form(r"[0-9a-f]{64}", "64 digits of 0-9 a-f")]
HashList = Annotated[list[Sha256], Field(min_length=1), AfterValidator(_unique)]
WheelFile = Annotated[str, AfterValidator(_wheel_file)]
Pin = Annotated[str, AfterValidator(_exact_pin)]
SystemPackage = Annotated[str, _form(r"[A-Za-z0-9][A-Za-z0-9.+:_~=-]*", "libnuma1")]
KernelModule = Annotated[str, _form(r"nvidia(_[a-z]+)?", "nvidia_uvm")]
ModuleParameter = Annotated[str, _form(r"[A-Za-z_]\w*", "uvm_disable_hmm")]
ParameterValue = Annotated[str, _form(r"[\w.,:;=+/-]*", "1")]
ToolkitComponent = Annotated[str, _form(r"[a-z][a-z0-9-]*", "nvcc")]
ModuleName = Annotated[str, _form(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "sgl_kernel")]
OperationName = Annotated[str, AfterValidator(_known_operation)]


class Driver(_Strict):
    """NVIDIA driver: exact version, which kernel module, and the parameters that the module must be loaded with."""

    version: Annotated[str, _form(r"\d{3}\.\d{2,3}(\.\d{2})?", "580.82.07")]
    flavour: Literal["open", "proprietary"] = "open"
    parameters: dict[KernelModule, dict[ModuleParameter, ParameterValue]] = {}


class Toolkit(_Strict):
    """CUDA toolkit: exact version, and whether /usr/local/cuda is to name it."""

    version: Annotated[str, _form(r"\d{2}\.\d{1,2}\.\d{1,2}", "13.0.1")]
    default: bool = False
    components: Annotated[list[ToolkitComponent], AfterValidator(_unique)] = []


class Index(_Strict):
    """A package index that serves only the packages listed: nothing else is ever looked up there."""

    name: Annotated[str, _form(r"[a-z0-9][a-z0-9-]{0,62}", "pytorch-cu130")]
    url: Annotated[str, _form(r"(https?|file)://\S+", "https://packages.example.com/simple")]
    packages: Annotated[list[str], Field(min_length=1), AfterValidator(_unique)]


class SystemPackages(_Strict):
    """Distribution packages the wheels need on a node, by package manager."""

    apt: Annotated[list[SystemPackage], AfterValidator(_unique)] = []
    dnf: Annotated[list[SystemPackage], AfterValidator(_unique)] = []


class Stack(_Strict):
    """The Python environment."""

    targets: Annotated[list[Target], Field(min_length=1), AfterValidator(_unique)]
    glibc: Annotated[str, AfterValidator(_known_glibc)]
    requirements: Annotated[list[Pin], Field(min_length=1)]
    indexes: list[Index] = []
    hashes: dict[Pin, dict[Target, HashList]] = {}
    system_packages: SystemPackages = SystemPackages()

    @model_validator(mode="after")
    def _consistent(self) -> Stack:
        names = [split_pin(pin)[0] for pin in self.requirements]
        _unique(names)
        _unique([index.name for index in self.indexes])
        _unique([canonicalize_name(package) for index in self.indexes for package in index.packages])
        for index in self.indexes:
            for package in index.packages:
                if canonicalize_name(package) not in names:
                    raise ValueError(
                        f"index {index.name} lists `{package}`, which `requirements` does not pin: "
                        "an index can only be chosen for pinned packages"
                    )
        for pin, by_target in self.hashes.items():
            for target in by_target:
                if target not in self.targets:
                    raise ValueError(f"hashes of `{pin}` name the target {target}, which `targets` does not list")
        return self


class Expect(_Strict):
    """What a node of this profile has: GPU count, PCI ids `vendor:device`, architecture; the rest is optional.

    bar1_min_mib: least BAR1 of each GPU in MiB. pcie_width: least lanes of each GPU's link. ecc: whether ECC is on.
    iommu: the mode that the kernel runs in (any = not judged).
    """

    gpus: Annotated[int, Field(ge=0, le=1024)]
    gpu_ids: list[Annotated[str, _form(r"[0-9a-f]{4}:[0-9a-f]{4}", "10de:2bb5")]] = []
    arch: Annotated[str, _form(r"sm_\d{2,3}[af]?", "sm_120")] | None = None
    bar1_min_mib: Annotated[int, Field(ge=1)] | None = None
    pcie_width: Literal[1, 2, 4, 8, 16] | None = None
    ecc: bool | None = None
    iommu: Literal["any", "off", "pt"] = "any"


class Collective(_Strict):
    """The collective check: sizes in bytes, bus bandwidth in GB/s (0 = not judged), limit in seconds."""

    backend: Literal["nccl", "gloo"] = "nccl"
    ranks: Annotated[list[Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1)]
    pairs: bool = False
    operations: Annotated[
        list[Literal["all_reduce", "all_gather", "reduce_scatter"]], Field(min_length=1), AfterValidator(_unique)
    ] = ["all_reduce"]
    max_bytes: Annotated[int, Field(ge=8)] = 67108864
    repeats: Annotated[int, Field(ge=1, le=1000)] = 5
    min_busbw_gbps: Annotated[float, Field(ge=0)] = 0.0
    warn_busbw_gbps: Annotated[float, Field(ge=0)] = 0.0
    timeout_s: Annotated[int, Field(ge=1, le=7200)] = 180


class Verify(_Strict):
    """What must work before a generation goes live."""

    imports: Annotated[list[ModuleName], Field(min_length=1), AfterValidator(_unique)]
    import_timeout_s: Annotated[int, Field(ge=1, le=7200)] = 180
    operations: Annotated[list[OperationName], AfterValidator(_unique)] = []
    collective: Collective


class ProfileData(_Strict):
    """profile.yml."""

    schema_: Literal[1] = Field(alias="schema")
    description: Annotated[str, StringConstraints(min_length=1)]
    refused: Annotated[str, StringConstraints(min_length=1)] | None = None
    driver: Driver | None = None
    toolkit: Toolkit | None = None
    stack: Stack
    expect: Expect
    verify: Verify


class LockedFile(_Strict):
    """The one wheel chosen for a package; `size` in bytes, None where the index does not tell."""

    name: str
    version: str
    file: WheelFile
    size: int | None
    sha256: Sha256


class TargetLock(_Strict):
    """One target of a lock: `sha256` is that of the file `<target>.lock`."""

    sha256: Sha256
    files: list[LockedFile]


class AbiStatus(_Strict):
    """Verdict of the ABI check over the locked wheels.

    `basis_sha256` is over what it depends on beside the files (`locking.abi_basis`); None where that is not known.
    """

    status: str
    reason: str
    basis_sha256: Sha256 | None = None


class LockData(_Strict):
    """lock.yml."""

    schema_: Literal[1] = Field(alias="schema")
    inputs_sha256: Sha256
    tools: dict[str, str]
    targets: dict[Target, TargetLock]
    abi: AbiStatus


Model = typing.TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], source: YamlFile) -> Model:
    """Return *source* as *model*; a BedplateError lists every mistake as `file:line: key: message`."""
    if not isinstance(source.data, dict):
        raise BedplateError(f"{source.path}:1: must be a mapping of keys")
    try:
        return model.model_validate(source.data)
    except ValidationError as error:
        lines = [_sentence(model, source, detail) for detail in error.errors()]
        raise BedplateError("\n".join(dict.fromkeys(lines))) from error


def _sentence(model: type[BaseModel], source: YamlFile, detail: ErrorDetails) -> str:
    # pydantic marks errors in a dictionary's key with a last part `[key]`
    location: Location = tuple(part for part in detail["loc"] if part != "[key]")
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    parent, leaf = location[:-1], str(location[-1]) if location else ""
    if kind == "extra_forbidden":
        allowed = _keys_at(model, parent)
        text = f"unknown key{near(leaf, allowed) or '.'} Allowed here: {', '.join(allowed)}"
    elif kind == "missing":
        return f"{source.where(parent)}: {_dotted(location)}: this key is missing"
    elif kind == "literal_error":
        allowed = re.findall(r"[\w.-]+", str(context.get("expected", "")).replace(" or ", " "))
        text = f"is `{value}`{near(str(value), allowed) or '.'} Allowed: {', '.join(allowed)}"
    elif kind == "string_type":
        hint = ": put it in quotes" if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
        text = f"must be text, is {value!r}{hint}"
    elif kind == "value_error":
        text = str(context.get("error", detail["msg"]))
    else:
        text = f"{detail['msg'][:1].lower()}{detail['msg'][1:]} (is {value!r})"
    return f"{source.where(location)}: {_dotted(location)}: {text}"


def _dotted(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "(whole file)"


def _keys_at(model: type[BaseModel], location: Location) -> list[str]:
    """Return the keys (as written in YAML) allowed at *location* of *model*."""
    current = model
    for part in location:
        field = _fields(current).get(str(part))
        # the number of a list item and the key of a free mapping are no fields: the model stays the same
        current = (_model_in(field.annotation) or current) if field else current
    return list(_fields(current))


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside an annotation such as `list[Index]` or `Driver | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, typing.get_args(annotation))), None)
