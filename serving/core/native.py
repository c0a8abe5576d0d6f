"""Loops of the decision that numba compiles, where it is installed and once they are ready.

A decision is a few hundred small NumPy calls, each of which costs a microsecond whatever it
computes; a compiled loop costs one such call for all of its work. So the hot ones exist twice,
side by side in the module that uses them: in NumPy, which is the definition and all that runs
without numba, and as a loop. Both take the same arguments and give the same results up to
rounding; the tests of the decision run over both.

Importing numba and compiling take seconds, so neither happens at import or at start-up
(serving/native_kernels.py says when): until then, and without numba, NumPy runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import types
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np


class Kernel:
    """One hot loop.

    Args:
        numpy: the NumPy definition; None where the caller holds it.
        loop: the same in a form numba compiles.
        signature: its numba types; one only, so callers keep dtypes and layouts. Arrays handed
            in are only read.

    Attributes:
        run: what callers call; `numpy` until `load`.
    """

    __slots__ = ("_compiled", "_loop", "_numpy", "_signature", "run")

    def __init__(
        self, numpy: Callable[..., Any] | None, loop: Callable[..., Any], signature: str
    ) -> None:
        self.run: Any = numpy
        self._numpy = numpy
        self._loop = loop
        self._signature = signature
        self._compiled: Callable[..., Any] | None = None

    def load(self) -> None:
        """Compiles the loop, or reads it from numba's cache, and runs it from now on.

        Raises:
            ModuleNotFoundError: numba is not installed.
        """
        if self._compiled is None:
            self._compiled = _compile(self._loop, self._signature)
        self.run = self._compiled

    def unload(self) -> None:
        """Returns to the NumPy definition."""
        self.run = self._numpy


def _compile(loop: Callable[..., Any], signature: str) -> Callable[..., Any]:
    numba = importlib.import_module("numba")
    told, result = importlib.import_module("numba.core.sigutils").normalize_signature(signature)
    given = [t.copy(readonly=True) if isinstance(t, numba.types.Array) else t for t in told]
    loop = _named_by_constants(loop)
    # Strict floating point: the same sums in the same order as the definition.
    try:
        return numba.njit(result(*given), cache=True, error_model="numpy")(loop)
    except (RuntimeError, OSError):  # nowhere to keep a cache: compiled anew in every process
        return numba.njit(result(*given), error_model="numpy")(loop)


def _named_by_constants(loop: Callable[..., Any]) -> Callable[..., Any]:
    """A copy under a name of its own for the values of the globals it reads.

    They are compiled in, and numba's cache goes by function and by the file it stands in: it would
    still serve the old code after a constant has changed that was imported into that file.
    """
    code, known = loop.__code__, loop.__globals__
    numbers = (bool, int, float, np.generic)
    read = [(name, known[name]) for name in code.co_names if isinstance(known.get(name), numbers)]
    copy = types.FunctionType(code, known, loop.__name__, loop.__defaults__)
    copy.__qualname__ = f"{loop.__qualname__}_{zlib.crc32(repr(read).encode()):08x}"
    return copy


def is_available() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None
