"""Spans of OpenTelemetry: one trace of a step, from the workers through their calls to the shards.

Off unless the environment names an exporter (OTEL_TRACES_EXPORTER=otlp or console, or
OTEL_EXPORTER_OTLP_ENDPOINT=http://HOST:4317) and the `tracing` extra is installed; the other
variables of OpenTelemetry, such as OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER, count as everywhere.

Only what happens within a `span` is traced, here and in the servers that it calls; heartbeats and
health checks are not. While tracing is off, `span` gives an object that does nothing, and channels
and servers are as if this module were not there.
"""

import logging
import os
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final

import grpc

_EXPORTERS = ("otlp", "console")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_log = logging.getLogger("heterps.tracing")


class _Off:
    """A span that nobody sees."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


_OFF = _Off()


def _is_on() -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    implied = "otlp" if any(os.environ.get(name) for name in _ENDPOINTS) else "none"
    name = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() or implied
    if name == "none":
        return False
    if name not in _EXPORTERS:
        _log.warning("OTEL_TRACES_EXPORTER=%s: expected otlp, console or none; no traces", name)
        return False
    for variable in _PROTOCOLS:
        if name == "otlp" and os.environ.get(variable) not in (None, "", "grpc"):
            _log.warning("%s=%s: expected grpc; no traces", variable, os.environ[variable])
            return False
    try:
        import chassis.spans  # noqa: F401
    except ImportError as error:
        _log.warning("no traces: %s; pip install 'heterps[tracing]' brings what is missing", error)
        return False
    return True


def begin_job(job_id: str) -> None:
    """Spans of a `step` in this process belong to that job from now on."""
    if ON:
        from chassis import spans

        spans.begin_job(job_id)


def span(
    name: str, *, step: int | None = None, **attributes: str | int | float
) -> AbstractContextManager[None]:
    """What happens within it, on this thread and on the pools it gives work to, is one span.

    Args:
        name: one of few; what differs from one to the next goes into attributes.
        step: of a job's training. Spans of one step share a trace in all processes of the job
            (see `begin_job`), also where none was caused by another.
    """
    if not ON:
        return _OFF
    from chassis import spans

    return spans.span(name, step, attributes)


def inject() -> tuple[tuple[str, str], ...]:
    """Metadata by which a server continues the span of this thread; empty outside of one."""
    if not ON:
        return ()
    from chassis import spans

    return spans.inject()


def continue_from(context: grpc.ServicerContext, name: str) -> AbstractContextManager[None]:
    """A span of a server's handler, caused by the caller's; nothing where the caller had none.

    `interceptors` does this for all methods that answer once; others may do it by hand.
    """
    if not ON:
        return _OFF
    from chassis import spans

    return spans.continue_from(context, name)


def channel(to: grpc.Channel, address: str) -> grpc.Channel:
    """A channel whose calls are spans when they are made within one."""
    if not ON:
        return to
    from chassis import spans

    return grpc.intercept_channel(to, spans.Calls(address))


def interceptors(role: str) -> list[grpc.ServerInterceptor]:
    """What makes a server continue its callers' spans; `role` names the process in traces."""
    if not ON:
        return []
    from chassis import spans

    spans.set_role(role)
    return [spans.Continues()]


ON: Final = _is_on()
