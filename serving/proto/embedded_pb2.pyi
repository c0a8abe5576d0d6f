from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PullRequest(_message.Message):
    __slots__ = ("remote_request_id", "lease", "block_ids")
    REMOTE_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    remote_request_id: str
    lease: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, remote_request_id: _Optional[str] = ..., lease: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class KvBlock(_message.Message):
    __slots__ = ("index", "keys", "values", "expert_counts", "num_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    keys: bytes
    values: bytes
    expert_counts: bytes
    num_tokens: int
    def __init__(self, index: _Optional[int] = ..., keys: _Optional[bytes] = ..., values: _Optional[bytes] = ..., expert_counts: _Optional[bytes] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("remote_request_id", "lease")
    REMOTE_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    remote_request_id: str
    lease: str
    def __init__(self, remote_request_id: _Optional[str] = ..., lease: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStepsRequest(_message.Message):
    __slots__ = ("since",)
    SINCE_FIELD_NUMBER: _ClassVar[int]
    since: int
    def __init__(self, since: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("sequence", "kind", "started_s", "duration_s", "num_tokens", "bucket_tokens", "distinct_experts", "request_ids")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: str
    started_s: float
    duration_s: float
    num_tokens: int
    bucket_tokens: int
    distinct_experts: float
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[str] = ..., started_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., num_tokens: _Optional[int] = ..., bucket_tokens: _Optional[int] = ..., distinct_experts: _Optional[float] = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class GetStepsResponse(_message.Message):
    __slots__ = ("steps", "next", "blocks_total", "blocks_in_use", "blocks_cached", "leases_open", "busy_s")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    LEASES_OPEN_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    next: int
    blocks_total: int
    blocks_in_use: int
    blocks_cached: int
    leases_open: int
    busy_s: float
    def __init__(self, steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., next: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_in_use: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., leases_open: _Optional[int] = ..., busy_s: _Optional[float] = ...) -> None: ...
