"""`eldr_sig`: masked expert counts inside `kv_transfer_params_json` (DESIGN, "Signals").

    {"version": 1, "mask_version": "mask-...", "dtype": "uint16", "shape": [Lm, E],
     "num_tokens": n, "base64": "..."}            little endian, row-major

The sender is an engine of any age behind any network: nothing in the object is believed
before it is checked, and its size is checked before a byte of it is decoded. Counts reach
num_tokens, so uint16 serves prompts of up to 65,535 tokens and uint32 the longer ones.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np

from serving.core.errors import InvalidRequest
from serving.core.signature import Signature, SignatureSource
from serving.signatures.model import SignatureModel

WIRE_VERSION = 1
_FIELD = "eldr_sig"
_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_MAX_UINT16 = np.iinfo(np.uint16).max
_MAX_TOKENS = 1 << 31


def encode_signature(
    counts_masked: np.ndarray, num_tokens: int, mask_version: str
) -> dict[str, Any]:
    """Makes the wire object.

    Args:
        counts_masked: integer [Lm, E], each row summing to num_tokens * k.
        num_tokens: prompt tokens counted, >= 1.
        mask_version: of the model whose layers these are.

    Returns:
        An object that `json.dumps` takes.

    Raises:
        ValueError: counts that cannot be those of `num_tokens` tokens.
    """
    if counts_masked.ndim != 2 or counts_masked.size == 0:
        raise ValueError(f"counts have shape {counts_masked.shape}, must be [Lm, E]")
    if not 1 <= num_tokens <= _MAX_TOKENS:
        raise ValueError(f"{num_tokens=} must lie in [1, {_MAX_TOKENS}]")
    if counts_masked.min() < 0 or counts_masked.max() > num_tokens:
        raise ValueError(f"counts must lie in [0, {num_tokens=}], got {counts_masked.max()=}")
    name = "uint16" if num_tokens <= _MAX_UINT16 else "uint32"
    raw = np.ascontiguousarray(counts_masked, dtype=_DTYPES[name]).tobytes()
    return {
        "version": WIRE_VERSION,
        "mask_version": mask_version,
        "dtype": name,
        "shape": list(counts_masked.shape),
        "num_tokens": int(num_tokens),
        "base64": base64.b64encode(raw).decode("ascii"),
    }


def decode_signature(
    obj: object, *, model: SignatureModel, num_prompt_tokens: int | None = None
) -> Signature:
    """Checks a wire object and makes the signature.

    Args:
        obj: the decoded JSON value of `eldr_sig`.
        model: the router's signature model.
        num_prompt_tokens: the prompt's length as the router knows it, when it does.

    Returns:
        A LIVE signature of confidence 1.

    Raises:
        InvalidRequest: names the member, its value and the rule it breaks.
    """
    if not isinstance(obj, Mapping):
        raise InvalidRequest(_FIELD, obj, "must be a JSON object")
    version = _member(obj, "version")
    if type(version) is not int or version != WIRE_VERSION:
        raise _bad("version", version, f"must be {WIRE_VERSION}")
    mask_version = _member(obj, "mask_version")
    if mask_version != model.mask_version:
        raise _bad("mask_version", mask_version, f"must be {model.mask_version!r}, the router's")
    num_tokens = _member(obj, "num_tokens")
    if type(num_tokens) is not int or not 1 <= num_tokens <= _MAX_TOKENS:
        raise _bad("num_tokens", num_tokens, f"must be an integer in [1, {_MAX_TOKENS}]")
    if num_prompt_tokens is not None and num_tokens != num_prompt_tokens:
        raise _bad("num_tokens", num_tokens, f"must be {num_prompt_tokens}, the prompt's length")
    dtype_name = _member(obj, "dtype")
    expected = "uint16" if num_tokens <= _MAX_UINT16 else "uint32"
    if dtype_name != expected:
        raise _bad("dtype", dtype_name, f"must be {expected!r} for {num_tokens} tokens")
    shape = _member(obj, "shape")
    wanted_shape = list(model.idf.shape)
    if not isinstance(shape, (list, tuple)) or list(shape) != wanted_shape:
        raise _bad("shape", shape, f"must be {wanted_shape}")
    counts = _counts(_member(obj, "base64"), _DTYPES[expected], model.idf.shape)
    if int(counts.max()) > num_tokens:
        raise _bad("base64", int(counts.max()), f"a count must be <= num_tokens={num_tokens}")
    row_sums = counts.sum(axis=1, dtype=np.uint64)
    wanted_sum = num_tokens * model.top_k
    if (wrong := np.flatnonzero(row_sums != wanted_sum)).size:
        row = int(wrong[0])
        raise _bad(
            "base64",
            int(row_sums[row]),
            f"counts of masked layer {row} must sum to num_tokens * k = {wanted_sum}",
        )
    return model.signature(counts, num_tokens, source=SignatureSource.LIVE)


def _counts(text: object, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """uint32 [Lm, E] from base64 text of exactly the right size."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    num_characters = 4 * -(-num_bytes // 3)
    if not isinstance(text, str) or len(text) != num_characters:
        got = len(text) if isinstance(text, str) else text
        raise _bad("base64", got, f"must be {num_characters} characters for shape {list(shape)}")
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise _bad("base64", text, f"must be standard base64 ({error})") from error
    if len(raw) != num_bytes:
        raise _bad("base64", len(raw), f"must decode to {num_bytes} bytes")
    return np.frombuffer(raw, dtype).reshape(shape).astype(np.uint32)


def _member(obj: Mapping[Any, Any], name: str) -> Any:
    if name not in obj:
        raise _bad(name, None, "is required and missing")
    return obj[name]


def _bad(name: str, value: object, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{_FIELD}.{name}", value, rule)
