"""The router's own chained hash of KV blocks: fast enough to sit in the decision.

Block i's hash names the whole prefix up to and including block i, so equal hashes mean an
equal prefix (same tokens, same salt). Everything is uint64 arithmetic modulo 2**64, done
for all blocks at once:

    b_i = mix(sum_j token_ij * m_j + a)                   multilinear over a block's tokens
    H_i = mix(sum_{j<=i} b_j * P**(i-j) + s * P**(i+1))   polynomial chain, s from the salt

with `mix` the splitmix64 finaliser (a bijection), m_j and P random odd, a random. Two different
blocks meet with a chance below 2**-(63 - v) over the draws of m, 2**v the largest power of two
that divides all differences of their token ids: 2**-63 for most, at the worst 2**-46 in a
vocabulary below 2**18. The chain is evaluated without a loop as P**i * cumsum(b_j * P**-j),
since an odd P has an inverse. Multipliers come from `seed`: give each deployment its own to keep
crafted collisions out. This is NOT the engines' hash (FACTS section 5): their events carry token
ids, which are hashed again here.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np

from serving.core.native import Kernel

ALGORITHM = "eldr_poly64_v2"
_MASK = (1 << 64) - 1
_MAX_BLOCKS = 1 << 16
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser on a uint64 array, in place (a bijection)."""
    values ^= values >> _SHIFT_30
    values *= _MULTIPLIER_1
    values ^= values >> _SHIFT_27
    values *= _MULTIPLIER_2
    values ^= values >> _SHIFT_31
    return values


class BlockHasher:
    """Hashes prompts into chained block hashes for one block size.

    Attributes:
        block_size_tokens: tokens per block.
        seed: deployment secret; hashes of different seeds are unrelated.
    """

    def __init__(self, block_size_tokens: int, *, seed: int = 0) -> None:
        if block_size_tokens < 1:
            raise ValueError(f"{block_size_tokens=} must be >= 1")
        self.block_size_tokens = block_size_tokens
        self.seed = seed
        draw = np.random.Generator(np.random.Philox(key=seed & _MASK))
        odd = np.uint64(1)
        self._multipliers = draw.integers(0, _MASK, block_size_tokens, np.uint64, True) | odd
        base = int(draw.integers(0, _MASK, dtype=np.uint64, endpoint=True)) | 1
        self._base = np.uint64(base)
        self._offset = draw.integers(0, _MASK, dtype=np.uint64, endpoint=True)

    def hashes(self, token_ids: np.ndarray, *, salt: str = "") -> np.ndarray:
        """Chained hashes of the FULL blocks of a prompt.

        Args:
            token_ids: integer [P]; a last partial block is not hashed.
            salt: cache salt or adapter name; "" shares with everybody.

        Returns:
            uint64 [P // block_size_tokens].
        """
        num_blocks = len(token_ids) // self.block_size_tokens
        if num_blocks > _MAX_BLOCKS:
            raise ValueError(f"{num_blocks=} must be <= {_MAX_BLOCKS}")
        if num_blocks == 0:
            return np.empty(0, np.uint64)
        return CHAIN.run(
            np.ascontiguousarray(token_ids, np.int32),
            self._multipliers,
            self._offset,
            self._base,
            np.uint64(_salt_value(salt)),
        )


def _chain_numpy(
    token_ids: np.ndarray,
    multipliers: np.ndarray,
    offset: np.uint64,
    base: np.uint64,
    salt: np.uint64,
) -> np.ndarray:
    """Chained hashes of the full blocks; see the module.

    Args:
        token_ids: int32 [P].
        multipliers: uint64 [B], m.
        offset: a.
        base: P of the chain.
        salt: s.

    Returns:
        uint64 [P // B].
    """
    size = len(multipliers)
    num_blocks = len(token_ids) // size
    powers, inverse_powers = _power_tables(int(base))
    tokens = token_ids[: num_blocks * size].astype(np.uint64)
    blocks = tokens.reshape(num_blocks, size) @ multipliers
    blocks += offset
    blocks = _mix(blocks)
    blocks *= inverse_powers[:num_blocks]
    chain = np.add.accumulate(blocks)
    if salt:
        chain += np.uint64(int(salt) * int(base) & _MASK)
    chain *= powers[:num_blocks]
    return _mix(chain)


def _chain_loop(token_ids, multipliers, offset, base, salt):
    """`_chain_numpy`, one block after another."""
    size = multipliers.shape[0]
    out = np.empty(token_ids.shape[0] // size, np.uint64)
    chain = salt
    for block in range(out.shape[0]):
        value = offset
        for place in range(size):
            value += np.uint64(token_ids[block * size + place]) * multipliers[place]
        value = (value ^ (value >> _SHIFT_30)) * _MULTIPLIER_1
        value = (value ^ (value >> _SHIFT_27)) * _MULTIPLIER_2
        chain = chain * base + (value ^ (value >> _SHIFT_31))
        value = (chain ^ (chain >> _SHIFT_30)) * _MULTIPLIER_1
        value = (value ^ (value >> _SHIFT_27)) * _MULTIPLIER_2
        out[block] = value ^ (value >> _SHIFT_31)
    return out


CHAIN = Kernel(_chain_numpy, _chain_loop, "u8[::1](i4[::1],u8[::1],u8,u8,u8)")


@functools.cache
def _power_tables(base: int) -> tuple[np.ndarray, np.ndarray]:
    """Powers of an odd base and of its inverse."""
    return _powers(base), _powers(pow(base, -1, 1 << 64))


def _powers(base: int) -> np.ndarray:
    """base**0 .. base**(_MAX_BLOCKS - 1) modulo 2**64, uint64."""
    table = np.ones(_MAX_BLOCKS, np.uint64)
    filled, step = 1, base
    while filled < _MAX_BLOCKS:
        table[filled : 2 * filled] = table[:filled] * np.uint64(step)
        filled, step = 2 * filled, step * step & _MASK
    return table


@functools.lru_cache(maxsize=4096)
def _salt_value(salt: str) -> int:
    """A 64-bit value per salt; 0 for the shared space."""
    if not salt:
        return 0
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "big") | 1
