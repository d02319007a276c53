"""Bedplate test stand-in, not PyTorch: flat tensors over bytes, as the rank child of Bedplate uses."""

from __future__ import annotations

import ctypes
import os
import struct

# _C: its DT_NEEDED brings libc10.so and libc10_cuda.so into the process. cuda: the real torch imports it too.
from torch import _C, cuda, version  # noqa: F401

__version__ = version.__version__

native = ctypes.CDLL(os.path.join(os.path.dirname(__file__), "lib", "libtorch_python.so"))
native.tiny_torch_add.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class dtype:  # noqa: N801  torch's name
    """The type of the elements: its number for the C code, its size in bytes."""

    def __init__(self, name: str, number: int, itemsize: int) -> None:
        self.name, self.number, self.itemsize = name, number, itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


int64 = dtype("int64", 0, 8)
float32 = dtype("float32", 1, 4)
bfloat16 = dtype("bfloat16", 2, 2)


class Tensor:
    """A flat tensor: a writable view of bytes and their type."""

    def __init__(self, data: memoryview, dtype: dtype) -> None:
        self.data, self.dtype = data, dtype

    def __len__(self) -> int:
        return len(self.data) // self.dtype.itemsize

    def __getitem__(self, key: int | slice) -> Tensor:
        start, stop, step = (key if isinstance(key, slice) else slice(key, key + 1)).indices(len(self))
        if step != 1:
            raise ValueError("this stand-in has slices of step 1 only")
        return Tensor(self.data[start * self.dtype.itemsize : stop * self.dtype.itemsize], self.dtype)

    def item(self) -> int | float:
        """Return the only element."""
        if len(self) != 1:
            raise ValueError("item() needs exactly one element")
        if self.dtype is int64:
            return struct.unpack("<q", self.data)[0]
        return struct.unpack("<f", bytes(4 - len(self.data)) + bytes(self.data))[0]

    def clone(self) -> Tensor:
        """Return a copy with its own memory."""
        return Tensor(memoryview(bytearray(self.data)), self.dtype)

    def copy_(self, other: Tensor) -> Tensor:
        """Overwrite the elements with another tensor's."""
        self.data[:] = other.data
        return self

    def to(self, device: str) -> Tensor:
        """Return self: there is only the CPU."""
        if device != "cpu":
            raise RuntimeError(f"this stand-in has no device {device}")
        return self

    def add_bytes(self, other: bytes) -> None:
        """Add another tensor's bytes in place, with the C code."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        if native.tiny_torch_add(address, other, len(other), self.dtype.number):
            raise TypeError(f"no addition for {self.dtype}")


def frombuffer(buffer: bytearray, *, dtype: dtype) -> Tensor:
    """Return a tensor over the memory of a writable buffer, which must hold whole elements as for the real torch."""
    if len(buffer) % dtype.itemsize:
        raise ValueError(
            f"buffer length ({len(buffer)} bytes) after offset (0 bytes) must be a multiple of element size "
            f"({dtype.itemsize})"
        )
    return Tensor(memoryview(buffer).cast("B"), dtype)


def equal(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same type, size and elements."""
    return one.dtype is other.dtype and one.data == other.data
