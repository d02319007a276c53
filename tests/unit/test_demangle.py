"""C++ names taken apart."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.node.abi import demangle as module
from bedplate.node.abi.demangle import demangle, differing, source_token, split_signature

needs_runtime = pytest.mark.skipif(module._demangler() is None, reason="no libstdc++")


@needs_runtime
@pytest.mark.parametrize(
    ("mangled", "qualified", "parameters", "token"),
    [
        (
            "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib",
            "c10::cuda::c10_cuda_check_implementation",
            ("int", "char const*", "char const*", "int", "bool"),
            "29c10_cuda_check_implementation",
        ),
        (
            "_ZNK2at10TensorBase14const_data_ptrIiLi0EEEPKT_v",
            "at::TensorBase::const_data_ptr<int, 0>",
            (),
            "14const_data_ptr",
        ),
        (
            "_ZN3c1013MessageLoggerC1EPKcii",
            "c10::MessageLogger::MessageLogger",
            ("char const*", "int", "int"),
            "13MessageLogger",
        ),
        ("_ZN3c10lsERSoNS_10DeviceTypeE", "c10::operator<<", ("std::ostream&", "c10::DeviceType"), "3c10"),
        ("_ZN5torch6detail10TensorImplcvbEv", "torch::detail::TensorImpl::operator bool", (), "10TensorImpl"),
        ("_ZN2at6native12_GLOBAL__N_13fooEi", "at::native::(anonymous namespace)::foo", ("int",), "3foo"),
        ("_ZTVN3c1010TensorImplE", "vtable for c10::TensorImpl", None, "10TensorImpl"),
        ("plain_c_name", "plain_c_name", None, "12plain_c_name"),
    ],
)
def test_names_are_taken_apart(mangled: str, qualified: str, parameters: tuple[str, ...] | None, token: str) -> None:
    signature = split_signature(demangle(mangled))
    assert (signature.qualified, signature.parameters) == (qualified, parameters)
    assert source_token(demangle(mangled)) == token


def test_parameters_with_commas_inside_stay_whole() -> None:
    signature = split_signature("f(std::map<int, char>, void (*)(int, int), bool) const")
    assert signature.parameters == ("std::map<int, char>", "void (*)(int, int)", "bool")
    assert signature.suffix == " const"


def test_differences_are_named_by_position() -> None:
    wanted, has = split_signature("f(int, bool)"), split_signature("f(int, char, long)")
    assert differing(wanted, has) == [
        {"position": 2, "wanted": "bool", "has": "char"},
        {"position": 3, "wanted": None, "has": "long"},
    ]


def test_without_a_runtime_names_stay_mangled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_demangler", lambda: None)
    demangle.cache_clear()
    assert demangle("_ZN3c101fEv") == "_ZN3c101fEv"
    demangle.cache_clear()


def test_names_too_long_to_trust_stay_mangled() -> None:
    name = "_Z" + "1" * (module.MAX_DEMANGLED_NAME + 1)
    assert demangle(name) == name


@given(st.text(alphabet="_ZNKSt0123456789abcEIPvi<>(), :&*", max_size=60))
def test_any_text_is_taken_apart(text: str) -> None:
    split_signature(text)
    source_token(demangle("_Z" + text))


def doubling(levels: int) -> str:
    """Return a name each of whose components is a template with the one before it twice as its arguments."""
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return "_Z1f1a1bIS_S_E" + "".join(f"S0_IS{digits[n]}_S{digits[n]}_E" for n in range(1, levels + 1))


@needs_runtime
@pytest.mark.parametrize(
    "name",
    [
        doubling(22),  # 130 MB
        "_Z1fI1aEv" + "T_" * 400,
        "_Z1fIJ" + "1a" * 2000 + "EEvDp1bIT_1bIT_EE",
    ],
)
def test_text_that_grows_without_measure_is_not_made(name: str) -> None:
    began = time.monotonic()
    assert len(demangle(name)) <= module.MAX_DEMANGLED_TEXT
    assert time.monotonic() - began < 1


@needs_runtime
@settings(deadline=None)
@given(st.lists(st.sampled_from(
    ["S_", "S0_", "S1_", "S2_", "S3_", "T_", "T0_", "1a", "1bI", "I", "J", "E", "N", "P", "R", "i", "Dp", "F", "Z", "y",
     "v", "St", "Ss", "C1", "cv", "1f", "X", "L"]
), max_size=40))  # fmt: skip
def test_no_text_is_longer_than_was_estimated(pieces: list[str]) -> None:
    name = "_Z1f" + "".join(pieces)
    call = module._demangler()
    assert call
    most = module.most_text(name)
    if most <= 1 << 20:
        assert len(call(name.encode()) or b"") <= most
