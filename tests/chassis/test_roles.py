"""One table says which role each method asks for; a server holds callers to it."""

import grpc
import pytest

from chassis.callers import Callers, RefusedError, job_token
from chassis.roles import REQUIRED, Caller, Role
from protos.reason_pb2 import ROLE_LACKING, TOKEN_REFUSED
from tests.methods import MAY, every_method

CLUSTER = "the-token-of-a-cluster"
PEOPLE = {role: f"a-token-that-may-{role}" for role in (Role.READ, Role.SUBMIT, Role.OPERATE)}
JOB = job_token(CLUSTER, "anna", "job-1")


def callers():
    known = {token: Caller(f"user-{role}", role) for role, token in PEOPLE.items()}
    return Callers(CLUSTER, known.get)


def ask(method, token):
    return callers().admit(method, (("authorization", f"Bearer {token}"),))


def test_every_method_has_a_role_and_every_role_a_method_that_is_there():
    ours = {method for method in REQUIRED if method.startswith("/heterps.")}
    assert ours == every_method()
    assert len(ours) > 45


def refusal(method, token):
    """Why a call is refused; None where it is admitted."""
    try:
        ask(method, token)
    except RefusedError as error:
        return error
    return None


def may(token):
    refused = {method: refusal(method, token) for method in every_method()}
    for method, why in refused.items():
        if why is not None:
            assert (why.code, why.reason) == (grpc.StatusCode.PERMISSION_DENIED, ROLE_LACKING)
            assert f"needs the role {REQUIRED[method]}" in why.details
    return {method for method, why in refused.items() if why is None}


def test_each_role_may_call_what_it_is_for_and_nothing_else():
    tokens = {**PEOPLE, Role.JOB: JOB, Role.CLUSTER: CLUSTER}
    for role, token in tokens.items():
        assert may(token) == MAY[role]


@pytest.mark.parametrize(
    "token",
    [
        "",
        "no",
        CLUSTER[:-1],
        CLUSTER + "x",
        JOB[:-1],
        JOB.replace("anna", "bob"),
        JOB.replace("job-1", "job-2"),
        JOB.replace("job:", "other:", 1),
        "job:anna:job-1:",
        job_token("another-cluster's-token", "anna", "job-1"),
        "\N{SNOWMAN}",
    ],
)
def test_a_token_that_nobody_knows_opens_nothing(token):
    for method in (*sorted(every_method()), "/heterps.v1.Scheduler/Unheard"):
        with pytest.raises(RefusedError) as caught:
            ask(method, token)
        assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
        assert caught.value.reason == TOKEN_REFUSED


def test_a_method_that_the_table_lacks_is_open_to_no_role():
    for token in (CLUSTER, *PEOPLE.values(), JOB):
        with pytest.raises(RefusedError) as caught:
            ask("/heterps.v1.Scheduler/Forgotten", token)
        assert caught.value.code is grpc.StatusCode.PERMISSION_DENIED


def test_whose_a_job_is_decides_who_sees_it():
    reader, anna = Caller("dashboard", Role.READ), Caller("anna", Role.SUBMIT)
    assert reader.sees("job-1", "anna")
    assert anna.sees("job-1", "anna")
    assert not anna.sees("job-2", "bob")
    assert not anna.sees("job-3", ""), "of a time when nobody was asked for a token"
    assert Caller("carol", Role.OPERATE).sees("job-1", "anna")
    process = Caller("anna", Role.JOB, "job-1")
    assert process.sees("job-1", "anna")
    assert not process.sees("job-2", "anna"), "another job of the same user"
    assert not process.sees("job-1", "bob"), "a later job of that name"
