"""Refusing a call with a reason: a heterps.v1.Reason, by name, in the trailing metadata."""

from typing import Any, NoReturn, Protocol

import grpc

from protos.reason_pb2 import REASON_UNSPECIFIED, Reason

_KEY = "heterps-reason"
Metadata = tuple[tuple[str, str], ...]


class Refusing(Protocol):
    """What refusing needs of a call's context; gRPC's has more."""

    def is_active(self) -> bool:
        """Whether the caller waits for an answer yet."""

    def set_trailing_metadata(self, trailing_metadata: Metadata, /) -> None:
        """What `abort` sends besides the status."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with a status, by raising."""


def refuse(
    context: Refusing,
    code: grpc.StatusCode,
    details: str,
    reason: Reason.ValueType = REASON_UNSPECIFIED,
) -> NoReturn:
    """End a call with a status, and a reason where there is one, by raising."""
    if reason:
        context.set_trailing_metadata(((_KEY, Reason.Name(reason)),))
    context.abort(code, details)


def reason_of(error: grpc.RpcError) -> Reason.ValueType:
    """The reason of a failed call; unspecified where none came, or one not known here."""
    call: Any = error  # gRPC's errors of a call are RpcError and Call at once
    metadata = (call.trailing_metadata() if hasattr(call, "trailing_metadata") else None) or ()
    name = next((value for key, value in metadata if key == _KEY), "")
    return Reason.Value(name) if name in Reason.DESCRIPTOR.values_by_name else REASON_UNSPECIFIED
