"""Who makes a call, by the token that it carries, and whether its role covers the method.

A server takes the token that it holds itself, and those of jobs, which anybody who holds the
cluster's token can tell: a job's is made from it, the job's id and its user, and opens nothing but
what that job needs. Its processes hold that one in place of the cluster's. A scheduler also knows
the tokens that were made for people.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from chassis.refusal import refuse
from chassis.roles import ANYBODY, OPEN, REQUIRED, ROOT, Caller, Role
from protos.reason_pb2 import ROLE_LACKING, TOKEN_REFUSED, Reason

_HEADER = "authorization"
_BEARER = "Bearer "
_OF_JOB = "job"  # how the token of a job begins
Metadata = Iterable[tuple[str, Any]]
Lookup = Callable[[str], Caller | None]
Answer = Callable[[grpc.ServicerContext], bytes]


class RefusedError(Exception):
    """A call that is not to be answered.

    Attributes:
        code: of its status.
        details: for people.
        reason: for programs.
    """

    def __init__(self, code: grpc.StatusCode, details: str, reason: Reason.ValueType) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.reason = reason


def job_token(token: str, user: str, job_id: str) -> str:
    """The token of a job's own processes.

    Args:
        token: the cluster's.
        user: who submitted the job.
    """
    return f"{_OF_JOB}:{user}:{job_id}:{_signature(token, user, job_id)}"


class Callers:
    """Tells who calls.

    Args:
        token: the server's own; None where nobody is asked for one.
        lookup: who else is known by a token.
    """

    def __init__(self, token: str | None, lookup: Lookup = lambda token: None) -> None:
        self._token = token
        self._lookup = lookup

    @property
    def ask(self) -> bool:
        """Whether callers are asked for a token."""
        return self._token is not None

    def known(self, shown: str) -> Caller:
        """Who shows this token.

        Raises:
            RefusedError: nobody who is known.
        """
        if self._token is None:
            return ANYBODY
        if hmac.compare_digest(shown.encode(errors="replace"), self._token.encode()):
            return Caller(ROOT, Role.CLUSTER)
        found = self._of_job(shown, self._token) or self._lookup(shown)
        if found is None:
            raise RefusedError(
                grpc.StatusCode.UNAUTHENTICATED,
                "the call's token is missing or wrong, or it was revoked or has expired",
                TOKEN_REFUSED,
            )
        return found

    def admit(self, method: str, metadata: Metadata) -> Caller:
        """Who makes this call, if it may.

        Raises:
            RefusedError: nobody who is known, or one whose role does not cover the method.
        """
        if method == OPEN:
            return ANYBODY
        caller = self.known(_shown(metadata))
        required = REQUIRED.get(method)
        if self._token is None or (required is not None and caller.role.covers(required)):
            return caller
        needed = f"needs the role {required}" if required else "is open to no role"
        raise RefusedError(
            grpc.StatusCode.PERMISSION_DENIED,
            f"{method.rpartition('/')[2]} {needed}; this token's is {caller.role}",
            ROLE_LACKING,
        )

    def of(self, context: grpc.ServicerContext) -> Caller:
        """Who makes a call that was admitted, or its end where the token has been revoked since."""
        try:
            return self.known(_shown(context.invocation_metadata()))
        except RefusedError as error:
            refuse(context, error.code, error.details, error.reason)

    def still(self, context: grpc.ServicerContext) -> bool:
        """Whether the token of a call that was admitted opens anything yet; asked by streams."""
        try:
            self.known(_shown(context.invocation_metadata()))
        except RefusedError:
            return False
        return True

    def interceptor(self, health: Answer) -> grpc.ServerInterceptor | None:
        """What checks every call before a server reads it; None where nobody is asked.

        Args:
            health: of the server; told to anybody.
        """
        return _Check(self, health) if self.ask else None

    @staticmethod
    def _of_job(shown: str, token: str) -> Caller | None:
        kind, _, rest = shown.partition(":")
        user, _, rest = rest.partition(":")
        job_id, _, signature = rest.partition(":")
        expected = _signature(token, user, job_id)
        equal = hmac.compare_digest(signature.encode(errors="replace"), expected.encode())
        return Caller(user, Role.JOB, job_id) if kind == _OF_JOB and equal else None


class _Check(grpc.ServerInterceptor):
    def __init__(self, callers: Callers, health: Answer) -> None:
        self._callers = callers
        # One thread for all that is not read: those who have a token may keep the others busy for
        # long, and what such a call has sent would be held meanwhile.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unread")
        self._health = self._unread(health)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details = handler_call_details
        if details.method == OPEN:
            return self._health
        try:
            self._callers.admit(details.method, details.invocation_metadata)
        except RefusedError as error:
            return self._unread(_refusing(error))
        return continuation(details)

    def _unread(self, answer: Answer) -> Any:
        """A handler that answers without the request.

        gRPC reads the one request of a unary call before it calls the handler, however large it
        is; of a stream it reads what the handler asks for, here nothing.
        """

        def handler(_: object, context: grpc.ServicerContext) -> bytes:
            return answer(context)

        handler.experimental_thread_pool = self._thread  # type: ignore[attr-defined]
        return grpc.stream_unary_rpc_method_handler(handler)


def _refusing(error: RefusedError) -> Answer:
    return lambda context: refuse(context, error.code, error.details, error.reason)


def _shown(metadata: Metadata) -> str:
    value = next((str(value) for key, value in metadata if key == _HEADER), "")
    return value[len(_BEARER) :] if value.startswith(_BEARER) else ""


def _signature(token: str, user: str, job_id: str) -> str:
    told = f"{_OF_JOB}:{user}:{job_id}".encode(errors="replace")
    return hmac.new(token.encode(), told, hashlib.sha256).hexdigest()
