"""Puts a servicer behind a gRPC server so that no failure escapes unmapped.

The generated `add_..._to_server` answers garbage bytes with a bare INTERNAL and lets an
exception of a handler leak its text. Here every request is parsed inside the handler, and
every failure of a handler leaves through `status.abort`. On a request stream one broken
message becomes a `Malformed` value, so that the handler can answer it and go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf import descriptor as proto_descriptor
from google.protobuf import message as proto_message
from google.protobuf import message_factory

from serving.core.errors import InvalidRequest
from serving.rpc import status

T = TypeVar("T", bound=proto_message.Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """Bytes that are not the message the method takes.

    Attributes:
        message_name: full protobuf name expected.
        num_bytes: size of what came.
    """

    message_name: str
    num_bytes: int

    def error(self) -> InvalidRequest:
        """The error to answer with."""
        return InvalidRequest(
            "message", f"{self.num_bytes} bytes", f"must be a serialized {self.message_name}"
        )


def parsed(message: T | Malformed) -> T:
    """The message itself.

    Raises:
        InvalidRequest: the bytes were not such a message.
    """
    if isinstance(message, Malformed):
        raise message.error()
    return message


def bind(
    server: grpc.aio.Server, service: proto_descriptor.ServiceDescriptor, servicer: object
) -> str:
    """Adds the methods of `service` that `servicer` has; the others stay UNIMPLEMENTED.

    Methods take (request, context). Unary requests arrive parsed; request streams arrive as
    async iterators of message or `Malformed`. Streaming answers are async generators.

    Returns:
        The service's full name, for reflection.
    """
    handlers = {
        method.name: _handler(method, getattr(servicer, method.name))
        for method in service.methods
        if hasattr(servicer, method.name)
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service.full_name, handlers),)
    )
    return service.full_name


def _handler(
    method: proto_descriptor.MethodDescriptor, call: Callable[..., Any]
) -> grpc.RpcMethodHandler:
    codec = {
        "request_deserializer": _deserializer(method.input_type),
        "response_serializer": lambda answer: answer.SerializeToString(),
    }
    match method.client_streaming, method.server_streaming:
        case False, False:
            return grpc.unary_unary_rpc_method_handler(_unary(call), **codec)
        case False, True:
            return grpc.unary_stream_rpc_method_handler(_streaming(call), **codec)
        case True, True:
            return grpc.stream_stream_rpc_method_handler(_streaming(call), **codec)
    raise NotImplementedError(f"{method.full_name} streams requests into one answer")


def _deserializer(
    message: proto_descriptor.Descriptor,
) -> Callable[[bytes], proto_message.Message | Malformed]:
    new_message = message_factory.GetMessageClass(message)

    def deserialize(data: bytes) -> proto_message.Message | Malformed:
        parsed_message = new_message()
        try:
            parsed_message.MergeFromString(data)
        except proto_message.DecodeError:
            return Malformed(message_name=message.full_name, num_bytes=len(data))
        return parsed_message

    return deserialize


def _unary(call: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await call(parsed(request), context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await status.abort(context, error)

    return handle


def _streaming(call: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            answers = call(parsed(request), context)
            try:
                async for answer in answers:
                    yield answer
            finally:
                await answers.aclose()
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except Exception as error:
            await status.abort(context, error)

    return handle
