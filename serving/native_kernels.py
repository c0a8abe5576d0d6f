"""All hot loops of the decision (core/native.py), loaded together, and when.

A replay loads them before its first run, so that all of it is decided by the same code. A server
serves first and loads them in a thread, which takes a core for half a second with numba's cache
and for some five without. Whether they are there shows in how long a decision takes and in the last
bit of its sums, in nothing else.
"""

from __future__ import annotations

import logging
import threading
import time

from serving.core import block_hash, experts, feasibility, native, step_kernel
from serving.fleet import depth_kernel, ledger, snapshot
from serving.policies import p2c, picking
from serving.signatures import model

_log = logging.getLogger(__name__)

KERNELS: tuple[native.Kernel, ...] = (
    block_hash.CHAIN,
    depth_kernel.DEPTHS,
    experts.KEEP,
    feasibility.FITS,
    ledger.MEMBERS,
    model.UNIT,
    p2c.TWO_OF,
    picking.LOWEST_TWO,
    snapshot.SNAPSHOT,
    step_kernel.DECODE,
)


def load() -> bool:
    """Compiles all of them, or reads them from the cache; again is quick.

    Returns:
        Whether they run now: False without numba.
    """
    if not native.is_available():
        return False
    for kernel in KERNELS:
        kernel.load()
    return True


def unload() -> None:
    """Returns to NumPy."""
    for kernel in KERNELS:
        kernel.unload()


def load_in_background() -> threading.Thread:
    """`load` in a thread; what goes wrong is logged, and NumPy runs on.

    Returns:
        The thread, a daemon; a server does not wait for it.
    """
    thread = threading.Thread(target=_load_and_tell, name="load-kernels", daemon=True)
    thread.start()
    return thread


def _load_and_tell() -> None:
    started_s = time.monotonic()
    try:
        loaded = load()
    except Exception:
        unload()
        _log.exception("decision kernels could not be compiled: decisions run on NumPy")
        return
    took_s = time.monotonic() - started_s
    if loaded:
        _log.info("decision kernels ready after %.1f s", took_s)
    else:
        _log.info("numba is not installed (extra 'compiled'): decisions run on NumPy")
