"""What a load tells that some shards took part in."""

import grpc
import pytest

from ps import CheckpointError, LocalShards, ParameterClient, ShardError
from ps.client import load
from ps.errors import ReplacedError


@pytest.mark.parametrize(
    ("later", "timeout_s"),
    [(CheckpointError("it is damaged now"), 60.0), (ReplacedError("another one"), 0.0)],
)
def test_an_attempt_that_changes_nothing_does_not_hide_that_one_before_did(
    tmp_path, monkeypatch, later, timeout_s
):
    half = load._HalfLoadedError(1, "here:1", grpc.StatusCode.UNAVAILABLE, "which shards [0] have")
    attempts = iter([half, later])

    def failing(*_: object) -> int:
        raise next(attempts)

    with LocalShards(1) as shards, ParameterClient(shards.addresses) as client:
        monkeypatch.setattr(load, "_load", failing)
        with pytest.raises(ShardError, match=r"which shards \[0\] have"):
            client.load(tmp_path, timeout_s=timeout_s)
