"""Tracing while it is on; loaded by `tracing.py` alone, for it needs the `tracing` extra."""

import hashlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import grpc
from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

R = TypeVar("R")
_trace_id: ContextVar[int] = ContextVar("heterps_trace_id", default=0)


@dataclass(slots=True)
class _Process:
    """Whose spans these are."""

    role: str = ""
    job_id: str = ""


_process = _Process()


class _Ids(RandomIdGenerator):
    """A new trace gets the id of its step, if it is one's, so that all processes agree on it.

    Samplers judge by the id: all processes keep the same steps.
    """

    def generate_trace_id(self) -> int:
        return _trace_id.get() or super().generate_trace_id()


def set_role(role: str) -> None:
    """Name this process, unless OTEL_SERVICE_NAME does; the first server of it counts."""
    _process.role = _process.role or role


def begin_job(job_id: str) -> None:
    """See `tracing.begin_job`."""
    _process.job_id = job_id


@contextmanager
def span(
    name: str, step: int | None, attributes: Mapping[str, str | int | float]
) -> Iterator[None]:
    """See `tracing.span`."""
    known: dict[str, str | int | float] = dict(attributes)
    token = None
    if step is not None:
        known["heterps.step"] = step
        if _process.job_id:
            known["heterps.job"] = _process.job_id
            token = _trace_id.set(_id_of(_process.job_id, step))
    try:
        with _tracer().start_as_current_span(name, attributes=known):
            yield
    finally:
        if token is not None:
            _trace_id.reset(token)


def inject() -> tuple[tuple[str, str], ...]:
    """See `tracing.inject`."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())


def continue_from(context: grpc.ServicerContext, name: str) -> AbstractContextManager[None]:
    """See `tracing.continue_from`."""
    caller = _caller(context.invocation_metadata())
    return nullcontext() if caller is None else _served(caller, name, context)


class Calls(grpc.UnaryUnaryClientInterceptor):
    """Makes a span of each call within a span, and tells the server about it."""

    def __init__(self, address: str) -> None:
        self._address = address

    def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.ClientCallDetails, Any], Any],
        client_call_details: grpc.ClientCallDetails,
        request: Any,
    ) -> Any:
        """Called by gRPC in place of the call."""
        if not trace.get_current_span().get_span_context().is_valid:
            return continuation(client_call_details, request)
        details: Any = client_call_details
        made = _tracer().start_span(
            _name(details.method),
            kind=trace.SpanKind.CLIENT,
            attributes={"rpc.system": "grpc", "server.address": self._address},
        )
        with trace.use_span(made):
            metadata = (*(details.metadata or ()), *inject())
        outcome = continuation(_with_metadata(details, metadata), request)

        def ended(call: Any) -> None:
            _set_status(made, call.code())
            made.end()

        outcome.add_done_callback(ended)
        return outcome


class Continues(grpc.ServerInterceptor):
    """Makes a span of each call that comes from one, where the answer is a single message."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Called by gRPC to find a method's handler."""
        handler = continuation(handler_call_details)
        # A stream of answers may last for a whole job: no span would hold it.
        if handler is None or handler.response_streaming:
            return handler
        caller = _caller(handler_call_details.invocation_metadata)
        if caller is None:
            return handler
        behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary

        def traced(request: Any, context: grpc.ServicerContext) -> Any:
            with _served(caller, _name(handler_call_details.method), context):
                return behaviour(request, context)

        wrap: Any = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return wrap(traced, handler.request_deserializer, handler.response_serializer)


@cache
def _tracer() -> trace.Tracer:
    """Made with the first span, so that a process that forks before it has no threads of it."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # else the program's own
        facts: dict[str, str | int] = {
            "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
            "process.pid": os.getpid(),
        }
        if not os.environ.get("OTEL_SERVICE_NAME"):
            facts["service.name"] = f"heterps-{_process.role}" if _process.role else "heterps"
        provider = TracerProvider(resource=Resource.create(facts), id_generator=_Ids())
        provider.add_span_processor(BatchSpanProcessor(_exporter()))
        trace.set_tracer_provider(provider)
    return trace.get_tracer("heterps")


def _exporter() -> SpanExporter:
    if os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "console":
        return ConsoleSpanExporter(out=sys.stderr)  # standard output may be a command's JSON
    return OTLPSpanExporter()  # finds its endpoint in the environment


def _id_of(job_id: str, step: int) -> int:
    digest = hashlib.sha256(f"{job_id}/{step}".encode()).digest()
    return int.from_bytes(digest[:16], "big") or 1


@contextmanager
def _served(caller: Context, name: str, context: grpc.ServicerContext) -> Iterator[None]:
    # An abort is an exception without a message: its code says more.
    with _tracer().start_as_current_span(
        name,
        caller,
        trace.SpanKind.SERVER,
        {"rpc.system": "grpc"},
        record_exception=False,
        set_status_on_exception=False,
    ) as made:
        failed = True
        try:
            yield
            failed = False
        finally:
            told: Any = context  # the published stubs leave `code` out
            code = told.code()
            _set_status(made, code or (grpc.StatusCode.UNKNOWN if failed else grpc.StatusCode.OK))


def _caller(metadata: Any) -> Context | None:
    found = {key: value for key, value in metadata or () if key in _FIELDS}
    return propagate.extract(found, Context()) if found else None


def _set_status(made: trace.Span, code: grpc.StatusCode) -> None:
    made.set_attribute("rpc.grpc.status_code", code.value[0])
    if code is not grpc.StatusCode.OK:
        made.set_status(trace.StatusCode.ERROR, code.name)


def _name(method: str | bytes) -> str:
    text = method.decode() if isinstance(method, bytes) else method
    return text.lstrip("/")


@dataclass(frozen=True, slots=True)
class _Details(grpc.ClientCallDetails):
    method: str
    timeout: float | None
    metadata: tuple[tuple[str, str | bytes], ...]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


def _with_metadata(details: Any, metadata: tuple[Any, ...]) -> _Details:
    return _Details(
        details.method,
        details.timeout,
        metadata,
        details.credentials,
        details.wait_for_ready,
        details.compression,
    )


def _carry_into_pools() -> None:
    """Let work given to a thread pool belong to the span of whoever gave it.

    Pulls and pushes run on pools. This is how OpenTelemetry's own threading instrumentation does
    it, and it leaves nothing behind in processes that are not traced.
    """
    submit = ThreadPoolExecutor.submit

    def within(context: Context, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        token = contexts.attach(context)
        try:
            return function(*args, **kwargs)
        finally:
            contexts.detach(token)

    def carrying(
        self: ThreadPoolExecutor, function: Callable[..., R], /, *args: Any, **kwargs: Any
    ) -> "Future[R]":
        context = contexts.get_current()
        if not context:
            return submit(self, function, *args, **kwargs)
        return submit(self, within, context, function, *args, **kwargs)

    ThreadPoolExecutor.submit = carrying  # type: ignore[method-assign, assignment]


_FIELDS = frozenset(propagate.get_global_textmap().fields)
_carry_into_pools()
