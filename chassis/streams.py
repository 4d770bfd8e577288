"""Requests that come as a stream are parsed by whoever takes them.

gRPC parses them before that. Of one that it cannot parse it tells the caller at once, and then
cannot end the call of the handler that still runs: its stream would be held for good.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class ParsedLate(grpc.ServerInterceptor):
    """For methods that take a stream: what is not a message is an error of the handler's loop."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler of a call, with requests that are parsed as they are taken."""
        handler = continuation(handler_call_details)
        if handler is None or not handler.request_streaming or not handler.request_deserializer:
            return handler
        parse = handler.request_deserializer
        behavior: Any = handler.stream_stream or handler.stream_unary

        def parsed(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            return behavior(map(parse, requests), context)

        make: Any = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        made: Handler = make(parsed, None, handler.response_serializer)
        return made
