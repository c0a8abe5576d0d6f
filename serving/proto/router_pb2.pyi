from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouteRequest(_message.Message):
    __slots__ = ("request_id", "model", "token_ids", "max_tokens", "cache_salt", "stage")
    class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STAGE_UNSPECIFIED: _ClassVar[RouteRequest.Stage]
        STAGE_PREFILL: _ClassVar[RouteRequest.Stage]
        STAGE_BOTH: _ClassVar[RouteRequest.Stage]
    STAGE_UNSPECIFIED: RouteRequest.Stage
    STAGE_PREFILL: RouteRequest.Stage
    STAGE_BOTH: RouteRequest.Stage
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    cache_salt: str
    stage: RouteRequest.Stage
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., cache_salt: _Optional[str] = ..., stage: _Optional[_Union[RouteRequest.Stage, str]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("worker_id", "address", "lease_id", "lease_expires_in_s", "runner_up_worker_id", "score_delta", "score_unit")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    RUNNER_UP_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_DELTA_FIELD_NUMBER: _ClassVar[int]
    SCORE_UNIT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    lease_id: str
    lease_expires_in_s: float
    runner_up_worker_id: str
    score_delta: float
    score_unit: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., lease_id: _Optional[str] = ..., lease_expires_in_s: _Optional[float] = ..., runner_up_worker_id: _Optional[str] = ..., score_delta: _Optional[float] = ..., score_unit: _Optional[str] = ...) -> None: ...

class RouteError(_message.Message):
    __slots__ = ("reason", "message", "facts", "retry_after_s", "retryable")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    facts: _containers.ScalarMap[str, str]
    retry_after_s: float
    retryable: bool
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ..., retry_after_s: _Optional[float] = ..., retryable: _Optional[bool] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("request_id", "model", "pool", "prefill", "decode", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    pool: str
    prefill: Placement
    decode: Placement
    error: RouteError
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., pool: _Optional[str] = ..., prefill: _Optional[_Union[Placement, _Mapping]] = ..., decode: _Optional[_Union[Placement, _Mapping]] = ..., error: _Optional[_Union[RouteError, _Mapping]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("request_id", "lease_id", "prefill_done", "first_token", "done", "failed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DONE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    lease_id: str
    prefill_done: PrefillDone
    first_token: FirstToken
    done: Done
    failed: Failed
    def __init__(self, request_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., prefill_done: _Optional[_Union[PrefillDone, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("kv_transfer_params_json", "cached_tokens")
    KV_TRANSFER_PARAMS_JSON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kv_transfer_params_json: str
    cached_tokens: int
    def __init__(self, kv_transfer_params_json: _Optional[str] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Done(_message.Message):
    __slots__ = ("num_output_tokens", "ttft_s", "tpot_s")
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    num_output_tokens: int
    ttft_s: float
    tpot_s: float
    def __init__(self, num_output_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("reason", "num_output_tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    num_output_tokens: int
    def __init__(self, reason: _Optional[str] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("decode",)
    DECODE_FIELD_NUMBER: _ClassVar[int]
    decode: Placement
    def __init__(self, decode: _Optional[_Union[Placement, _Mapping]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_id", "extend_s")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EXTEND_S_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    extend_s: float
    def __init__(self, lease_id: _Optional[str] = ..., extend_s: _Optional[float] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("lease_expires_in_s",)
    LEASE_EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    lease_expires_in_s: float
    def __init__(self, lease_expires_in_s: _Optional[float] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("lines_json", "text")
    LINES_JSON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    lines_json: _containers.RepeatedScalarFieldContainer[str]
    text: str
    def __init__(self, lines_json: _Optional[_Iterable[str]] = ..., text: _Optional[str] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "address", "role", "state", "pool", "model", "hardware", "ici_domain", "num_running", "num_waiting", "num_inflight", "kv_blocks_free", "telemetry_age_s", "accepts")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    ICI_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_AGE_S_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    role: str
    state: str
    pool: str
    model: str
    hardware: str
    ici_domain: str
    num_running: int
    num_waiting: int
    num_inflight: int
    kv_blocks_free: int
    telemetry_age_s: float
    accepts: bool
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., pool: _Optional[str] = ..., model: _Optional[str] = ..., hardware: _Optional[str] = ..., ici_domain: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_inflight: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., telemetry_age_s: _Optional[float] = ..., accepts: _Optional[bool] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...
