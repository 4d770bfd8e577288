"""Failures of calls: told apart by code and reason, whatever their words are."""

import grpc
import pytest

from chassis.channels import RpcError
from heterps.client.calls import explain
from heterps.errors import (
    HeterpsError,
    MissingCodeError,
    NoDecisionError,
    UnknownJobError,
    UnreachableError,
)
from heterps.home.target import Target
from protos.reason_pb2 import CODE_MISSING, NO_DECISION, REASON_UNSPECIFIED, STORE_UNREACHABLE

TARGET = Target("host.example:7000")


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, STORE_UNREACHABLE, UnreachableError),
        (grpc.StatusCode.UNAVAILABLE, REASON_UNSPECIFIED, UnreachableError),
        (grpc.StatusCode.NOT_FOUND, NO_DECISION, NoDecisionError),
        (grpc.StatusCode.NOT_FOUND, REASON_UNSPECIFIED, UnknownJobError),
        (grpc.StatusCode.FAILED_PRECONDITION, CODE_MISSING, MissingCodeError),
        (grpc.StatusCode.FAILED_PRECONDITION, REASON_UNSPECIFIED, HeterpsError),
    ],
)
@pytest.mark.parametrize("words", ["said otherwise", "redis no decision code_digest"])
def test_the_kind_of_a_failure_is_not_read_from_its_words(code, reason, kind, words):
    told = explain(TARGET, RpcError("scheduler: a call", code, words, reason), "job-1")
    assert type(told) is kind
    assert words in str(told)


def test_a_redis_that_is_away_is_no_scheduler_that_is_away():
    away = RpcError("scheduler: a call", grpc.StatusCode.UNAVAILABLE, "cannot be reached")
    store = RpcError("", grpc.StatusCode.UNAVAILABLE, "cannot be reached", STORE_UNREACHABLE)
    assert "no scheduler answers" in str(explain(TARGET, away))
    assert "answers, but not its Redis" in str(explain(TARGET, store))
