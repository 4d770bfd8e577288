"""The gRPC service of tokens."""

import logging

import grpc

from chassis.callers import Callers
from chassis.refusal import refuse
from protos.access_pb2 import (
    CreateTokenReply,
    CreateTokenRequest,
    Identity,
    ListTokensReply,
    ListTokensRequest,
    RevokeTokenReply,
    RevokeTokenRequest,
    WhoAmIRequest,
)
from protos.access_pb2_grpc import AccessServicer
from protos.reason_pb2 import STORE_UNREACHABLE
from scheduler.state.store import StoreError
from scheduler.state.tokens import NameTakenError, TokenError, Tokens

_log = logging.getLogger("heterps.access")


class AccessService(AccessServicer):
    """The gRPC methods; all state lies in `tokens`."""

    def __init__(self, tokens: Tokens, callers: Callers) -> None:
        self._tokens = tokens
        self._callers = callers

    def WhoAmI(self, request: WhoAmIRequest, context: grpc.ServicerContext) -> Identity:  # noqa: N802
        """Who the caller is to this scheduler."""
        caller = self._callers.of(context)
        return Identity(user=caller.user, role=caller.role)

    def CreateToken(  # noqa: N802
        self, request: CreateTokenRequest, context: grpc.ServicerContext
    ) -> CreateTokenReply:
        """Make a token; its secret is told this once."""
        by = self._callers.of(context).user
        if not self._callers.ask:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this scheduler asks nobody for a token: it listens on loopback without TLS; "
                "expected one with the files of `heterps certs`",
            )
        try:
            token, secret = self._tokens.create(request.name, request.role, request.expires_s, by)
        except NameTakenError as error:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, str(error))
        except TokenError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except StoreError as error:
            refuse(context, grpc.StatusCode.UNAVAILABLE, str(error), STORE_UNREACHABLE)
        _log.info("token %s (%s) was made by %s", token.name, token.role, by)
        return CreateTokenReply(token=token, secret=secret)

    def ListTokens(  # noqa: N802
        self, request: ListTokensRequest, context: grpc.ServicerContext
    ) -> ListTokensReply:
        """All tokens, without their secrets."""
        return ListTokensReply(tokens=self._tokens.all())

    def RevokeToken(  # noqa: N802
        self, request: RevokeTokenRequest, context: grpc.ServicerContext
    ) -> RevokeTokenReply:
        """Make a token open nothing from now on."""
        by = self._callers.of(context).user
        try:
            revoked = self._tokens.revoke(request.name)
        except StoreError as error:
            refuse(context, grpc.StatusCode.UNAVAILABLE, str(error), STORE_UNREACHABLE)
        if revoked:
            _log.info("token %s was revoked by %s", request.name, by)
        return RevokeTokenReply(revoked=revoked)
