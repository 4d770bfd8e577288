"""Which cluster is meant, and with which credentials it is spoken to."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from chassis.security import AUTHORITY, CERTIFICATE, KEY, VARIABLES, Security, SecurityError
from heterps.errors import ContextError, UnreachableError
from heterps.home import contexts, local
from heterps.home.contexts import LOCAL, Context

SCHEDULER = "HETERPS_SCHEDULER"
CONTEXT = "HETERPS_CONTEXT"


@dataclass(frozen=True, slots=True)
class Target:
    """A scheduler.

    Attributes:
        address: host:port.
        name: of the context that it is from, empty where it is from none.
        context: that context.
        chosen: whether somebody named the context now: it then goes with its own files, the
            current context with those of the environment before its own.
        token: to show in place of the one in those files; empty for that one.
    """

    address: str
    name: str = ""
    context: Context | None = None
    chosen: bool = False
    token: str = field(default="", repr=False)

    @staticmethod
    def find(address: str | None = None, context: str | None = None) -> "Target":
        """What is named, else $HETERPS_SCHEDULER, the current context, or what `up` started.

        Raises:
            ContextError: both are given; there is no such context, or its file is wrong.
            UnreachableError: no address is known.
        """
        if (named := Target.named(address, context)) is not None:
            return named
        if known := os.environ.get(SCHEDULER):
            return Target(known)
        known_contexts = contexts.load()
        if name := known_contexts.current:
            found = known_contexts.get(name, f"{contexts.path()}: current")
            return Target(found.scheduler, name, found)
        return _local("")

    @staticmethod
    def named(address: str | None = None, context: str | None = None) -> "Target | None":
        """What is named by argument or $HETERPS_CONTEXT; None where nothing is.

        Raises:
            ContextError, UnreachableError: as `find`.
        """
        if address and context:
            raise ContextError(f"address {address} and context {context!r}: expected one of them")
        if address:
            return Target(address)
        name = context or os.environ.get(CONTEXT)
        if not name:
            return None
        if name == LOCAL:
            return _local(LOCAL)
        found = contexts.load().get(name, "context" if context else f"{CONTEXT}={name}")
        return Target(found.scheduler, name, found, chosen=True)

    def __str__(self) -> str:
        return f"{self.address} (context {self.name})" if self.context else self.address

    def credentials(self) -> Security:
        """What to speak to it with.

        Raises:
            ContextError, SecurityError: a file that the context or the environment names cannot
                be used.
        """
        named = self.security() or Security.from_environment()
        return replace(named, token=self.token) if self.token else named

    def security(self) -> Security | None:
        """What to speak to it with; None for what the environment names.

        Raises:
            ContextError: a file that the context names cannot be used.
        """
        if self.context is None:
            return None
        try:
            return Security.from_files(self._files(), self._source)
        except SecurityError as error:
            raise ContextError(
                f"{error}\nName other files with `heterps context set {self.name}`; "
                f"see them with `heterps context show {self.name}`."
            ) from None

    @contextmanager
    def exported(self) -> Iterator[None]:
        """Let this process, and those that it starts, find the same files in the environment."""
        if self.context is None:
            yield
            return
        self.security()  # says which file is wrong in the context's words
        files = self._files()
        before = {variable: os.environ.get(variable) for variable in VARIABLES}
        for variable in VARIABLES:
            os.environ.pop(variable, None)
        os.environ.update(files)
        try:
            yield
        finally:
            for variable, value in before.items():
                if value is None:
                    os.environ.pop(variable, None)
                else:
                    os.environ[variable] = value

    @property
    def tls_hint(self) -> str:
        """What an unreachable scheduler may have expected."""
        if self._files().get(AUTHORITY):
            return ""
        how = (
            f"type `heterps context set {self.name} --ca FILE --token-file FILE`"
            if self.context
            else "set HETERPS_TLS_CA and HETERPS_TOKEN_FILE"
        )
        return f" If it listens with TLS, {how}."

    @property
    def away_hint(self) -> str:
        """What to type when it does not answer."""
        if self.context is None:
            return f"Start a cluster with `heterps up`, or name another with {SCHEDULER}=HOST:PORT."
        return (
            f"See where it should be with `heterps context show {self.name}`, "
            "or change to another with `heterps context use NAME`."
        )

    @property
    def refused_hint(self) -> str:
        """What to type when it takes us for a stranger."""
        if self.context is None:
            return (
                "Set HETERPS_TOKEN_FILE to the cluster's token file and HETERPS_TLS_CA to its CA."
            )
        return (
            "Name the cluster's token file and CA with "
            f"`heterps context set {self.name} --ca FILE --token-file FILE`."
        )

    def _files(self) -> Mapping[str, str]:
        """The files by variable.

        A context that is chosen is never given the CA or the token of another cluster, whose they
        would be in the environment; certificate and key are those of this machine.
        """
        given = {v: path for v in VARIABLES if (path := os.environ.get(v))}
        own = self.context.files() if self.context else {}
        if not self.chosen:
            return {**own, **given}
        pair = (CERTIFICATE, KEY)
        machine = {} if own.keys() & set(pair) else {v: given[v] for v in pair if v in given}
        return {**machine, **own}

    def _source(self, variable: str) -> str:
        """Where a variable's path is from, for errors."""
        own = self.context.files() if self.context else {}
        if os.environ.get(variable) and not (self.chosen and variable in own):
            return variable
        return f"{contexts.path()}: contexts.{self.name}.{contexts.KEYS[variable]}"


def _local(name: str) -> Target:
    cluster = local.running()
    if cluster is None:
        raise UnreachableError(
            "no cluster is running here.\n"
            f"Start one with `heterps up`, or name one with {SCHEDULER}=HOST:PORT or "
            "`heterps context use NAME`."
        )
    return Target(cluster.address, name)
