"""Requests that are no message of their method end in a refusal.

gRPC's own refusal of them does not end on the server: the call is kept, and counts among those that
its connection may have at once, for as long as the connection lasts.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

_OURS = "/heterps."
Behavior = Callable[[Any, grpc.ServicerContext], Any]


@dataclass(frozen=True, slots=True)
class _Malformed:
    text: str


class Parsing(grpc.ServerInterceptor):
    """What parses the requests of our services."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, with another parser."""
        handler = continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_OURS):
            return handler
        parse = handler.request_deserializer
        if parse is None:  # it takes bytes
            return handler
        checked = _checked_stream if handler.request_streaming else _checked
        kinds = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }
        make, behavior = kinds[handler.request_streaming, handler.response_streaming]
        return make(checked(behavior), _parser(parse), handler.response_serializer)


def _parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parser(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return _Malformed(str(error))

    return parser


def _checked(behavior: Behavior) -> Behavior:
    def handle(request: Any, context: grpc.ServicerContext) -> Any:
        if isinstance(request, _Malformed):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.text)
        return behavior(request, context)

    return handle


def _checked_stream(behavior: Behavior) -> Behavior:
    def checked(requests: Iterable[Any]) -> Iterator[Any]:
        for request in requests:
            if isinstance(request, _Malformed):
                raise DecodeError(request.text)
            yield request

    return lambda requests, context: behavior(checked(requests), context)
