"""`kv_transfer_params_json` of a hand-over from prefill to decode, as vLLM's NIXL carries it.

    to prefill        {"do_remote_decode": true}
    prefill answers   {"remote_host", "remote_port", "remote_block_ids", "remote_request_id",
                       "lease", "eldr_sig"}
    to decode         the answer, as it is

Members this worker does not know (another router's annotations) are left alone; those it knows
are checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from serving.core.errors import InvalidRequest

_FIELD = "kv_transfer_params_json"
_MAX_CHARACTERS = 1 << 24
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class HandOver(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the KV of a finished prefill lies.

    Attributes:
        remote_host: prefill worker's host.
        remote_port: prefill worker's port.
        remote_block_ids: its block of each block of the prompt.
        remote_request_id: its name of the request.
        lease: proof that this request may take them, once.
        eldr_sig: the prompt's expert counts (serving/signatures/wire.py); None without a model.
    """

    remote_host: _Text
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_block_ids: Annotated[tuple[_BlockId, ...], msgspec.Meta(min_length=1)]
    remote_request_id: _Text
    lease: _Text
    eldr_sig: dict[str, Any] | None = None

    @property
    def address(self) -> str:
        """Where to pull from, "host:port"."""
        host = f"[{self.remote_host}]" if ":" in self.remote_host else self.remote_host
        return f"{host}:{self.remote_port}"


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    do_remote_decode: bool = False
    do_remote_prefill: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferParams:
    """What a request asks of the KV transfer.

    Attributes:
        do_remote_decode: keep the KV for a decode worker.
        hand_over: take the KV from there; None to compute it here.
    """

    do_remote_decode: bool = False
    hand_over: HandOver | None = None


_NULL = msgspec.Raw(b"null")  # as proxies send what they leave out
_ORDER = msgspec.json.Decoder(_Order)
_HAND_OVER = msgspec.json.Decoder(HandOver)


def parse_transfer_params(text: str) -> TransferParams:
    """Reads the member of a request; "" asks for nothing.

    Raises:
        InvalidRequest: not such an object, or both directions at once.
    """
    if not text:
        return TransferParams()
    if len(text) > _MAX_CHARACTERS:
        raise InvalidRequest(_FIELD, f"{len(text)} characters", f"must be <= {_MAX_CHARACTERS}")
    try:
        order = _ORDER.decode(text)
        members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        carries = any(members.get(name, _NULL) != _NULL for name in HandOver.__struct_fields__)
        takes = order.do_remote_prefill or carries
        hand_over = _HAND_OVER.decode(text) if takes else None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(_FIELD, text, f"must be a hand-over object: {error}") from error
    if order.do_remote_decode and hand_over is not None:
        rule = "must not ask for a remote decode and carry a remote prefill at once"
        raise InvalidRequest(_FIELD, text, rule)
    return TransferParams(do_remote_decode=order.do_remote_decode, hand_over=hand_over)


def encode_hand_over(hand_over: HandOver) -> str:
    """The member of a prefill answer."""
    return msgspec.json.encode(hand_over).decode()
