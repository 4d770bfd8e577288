"""Requests are parsed by the thread that handles them, and what is no message is refused by it.

gRPC would parse them before that. It then says INTERNAL where the caller was wrong, and holds the
stream of each such call until its connection ends: over a hundred, and nobody is served on it.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class ParsingLate(grpc.ServerInterceptor):
    """For all methods that take messages of protobuf."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler of a call, which takes bytes."""
        handler = continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        made: Handler = _MAKERS[handler.request_streaming, handler.response_streaming](
            _parsing(handler), None, handler.response_serializer
        )
        return made


def _parsing(handler: Any) -> Callable[[Any, grpc.ServicerContext], Any]:
    parse = handler.request_deserializer
    behavior = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )

    def of_one(data: bytes, context: grpc.ServicerContext) -> Any:
        try:
            request = parse(data)
        except DecodeError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return behavior(request, context)

    def of_many(stream: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        return behavior(map(parse, stream), context)  # its loop meets what is no message

    return of_many if handler.request_streaming else of_one


_MAKERS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
