"""What a shard answers when a handler fails."""

from typing import NoReturn
from urllib.error import URLError

import grpc
import pytest

from chassis.refusal import Metadata, reason_of
from protos import parameter_server_pb2 as pb
from protos.reason_pb2 import MEMORY_NOT_ATTACHED, REASON_UNSPECIFIED, Reason
from ps.errors import NotAttachedError
from ps.lines.calls import RefusedError
from ps.server.service import ParameterService
from ps.shard.state import ShardState


class Context:
    """Of a call."""

    metadata: Metadata = ()

    def set_trailing_metadata(self, trailing_metadata: Metadata, /) -> None:
        self.metadata = trailing_metadata

    def is_active(self) -> bool:
        return True

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise RefusedError(code, details, self.metadata)


@pytest.mark.parametrize(
    ("error", "code", "text", "reason"),
    [
        (
            NotAttachedError("gone"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "gone",
            MEMORY_NOT_ATTACHED,
        ),
        (
            URLError("no route"),  # its `reason` is a text
            grpc.StatusCode.INTERNAL,
            "URLError: <urlopen error no route>",
            REASON_UNSPECIFIED,
        ),
    ],
)
def test_an_error_becomes_a_status(
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: grpc.StatusCode,
    text: str,
    reason: Reason.ValueType,
) -> None:
    def fail(_: pb.SaveRequest) -> pb.SaveReply:
        raise error

    service = ParameterService(ShardState())
    monkeypatch.setattr(service.saver, "save", fail)
    with pytest.raises(RefusedError) as refused:
        service.Save(pb.SaveRequest(), Context())
    assert (refused.value.code(), refused.value.details()) == (code, text)
    assert reason_of(refused.value) == reason
