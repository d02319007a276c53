"""As much of torch as the operation probe touches: lists of numbers, and GPUs whose number a variable gives."""

from __future__ import annotations

import os

from torch import cuda, distributed  # noqa: F401

float64 = "float64"


class Tensor:
    """A list of numbers."""

    def __init__(self, numbers):
        self.numbers = list(numbers)

    @property
    def shape(self):
        return (len(self.numbers),)

    def detach(self):
        return self

    def to(self, device, dtype):
        if (device, dtype) != ("cpu", float64):
            raise AssertionError("results are compared on the CPU, in float64")
        return Tensor(float(number) for number in self.numbers)

    def abs(self):
        return Tensor(abs(number) for number in self.numbers)

    def max(self):
        return max(self.numbers)

    def sum(self):
        return sum(self.numbers)

    def numel(self):
        return len(self.numbers)

    def flatten(self):
        return self

    def nonzero(self):
        return [index for index, number in enumerate(self.numbers) if number]

    def __sub__(self, other):
        return Tensor(a - b for a, b in zip(self.numbers, other.numbers))

    def __le__(self, limit):
        return Tensor(number <= limit for number in self.numbers)

    def __invert__(self):
        return Tensor(not number for number in self.numbers)

    def __getitem__(self, index):
        return self.numbers[index]


def tensor(numbers):
    """Return a tensor."""
    return Tensor(numbers)


if os.environ.get("FAKE_IMPORT"):
    raise ImportError(os.environ["FAKE_IMPORT"])
if os.environ.get("FAKE_IMPORT_ABORTS"):
    os.abort()
