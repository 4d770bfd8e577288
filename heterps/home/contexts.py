"""Clusters that a user has named: $HETERPS_HOME/contexts.yaml, for its owner alone.

It names files of credentials and never holds a token itself.
"""

import contextlib
import fcntl
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from yaml import MappingNode, Node, ScalarNode

from chassis import security
from chassis.files import replace_file
from chassis.near import nearest
from heterps.errors import ContextError
from heterps.home.local import home
from heterps.job import yaml_nodes

LOCAL = "local"  # the cluster that `heterps up` started; it has no entry
SEE_ALL = "See all with `heterps context list`."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Context:
    """One cluster.

    Attributes:
        scheduler: host:port.
        ca: who signed its certificates; without one the scheduler is spoken to without TLS.
        cert, key: of nodes and shards that are started here.
        token_file: what holds the token that calls show.
    """

    scheduler: str
    ca: str = ""
    cert: str = ""
    key: str = ""
    token_file: str = ""

    def files(self) -> dict[str, str]:
        """Its files, by the variable that would name each."""
        return {variable: path for variable, key in KEYS.items() if (path := getattr(self, key))}


KEYS = {
    security.AUTHORITY: "ca",
    security.CERTIFICATE: "cert",
    security.KEY: "key",
    security.TOKEN: "token_file",
}
_FIELDS = [one.name for one in fields(Context)]


@dataclass(frozen=True, slots=True)
class Contexts:
    """All that are named, and the one that commands use; empty for `local`."""

    current: str = ""
    named: Mapping[str, Context] = field(default_factory=dict)

    def get(self, name: str, source: str) -> Context:
        """The context of a name.

        Args:
            source: who said the name, for the error.

        Raises:
            ContextError: there is none.
        """
        if name in self.named:
            return self.named[name]
        near = nearest(name, [*self.named, LOCAL])
        hint = f"did you mean {near}?" if near else f"expected one of {', '.join(self.all())}."
        raise ContextError(f"{source}: no context {name!r} in {path()}; {hint}\n{SEE_ALL}")

    def all(self) -> list[str]:
        """Every name, `local` first."""
        return [LOCAL, *sorted(self.named)]


def path() -> Path:
    """The file."""
    return home() / "contexts.yaml"


def load() -> Contexts:
    """What the file holds; nothing where there is none.

    Raises:
        ContextError: it cannot be read, or is wrong; names line, key, value and what was expected.
    """
    try:
        if not path().exists() or not path().read_text(encoding="utf-8").strip():
            return Contexts()
        return _read(yaml_nodes.read(path(), str(path())))
    except (ContextError, yaml_nodes.YamlError, OSError, UnicodeDecodeError) as error:
        raise ContextError(f"{error}\nCorrect it with `$EDITOR {path()}`.") from None


def set_context(name: str, values: Mapping[str, str]) -> Context:
    """Add a context, or change the given keys of one; it as it is now.

    Raises:
        ContextError: the name or a value cannot be used; nothing was changed.
    """
    _check_name(name)
    with _editing() as before:
        known = before.named.get(name)
        if known is None and not values.get("scheduler"):
            raise ContextError(
                f"context {name!r} is new; expected --scheduler HOST:PORT\n"
                f"Type `heterps context set {name} --scheduler HOST:PORT`."
            )
        made = replace(known or Context(""), **values)
        _check(name, made)
        _write(replace(before, named={**before.named, name: made}))
    return made


def use(name: str) -> None:
    """Make a context the current one; `local` leaves none.

    Raises:
        ContextError: there is no such context.
    """
    with _editing() as before:
        if name != LOCAL:
            before.get(name, "heterps context use")
        _write(replace(before, current="" if name == LOCAL else name))


def remove(name: str) -> bool:
    """Forget a context; whether it was the current one.

    Raises:
        ContextError: there is no such context.
    """
    if name == LOCAL:
        raise ContextError(f"{LOCAL!r} is the cluster of `heterps up`; end it with `heterps down`")
    with _editing() as before:
        before.get(name, "heterps context remove")
        left = {other: one for other, one in before.named.items() if other != name}
        was_current = before.current == name
        _write(Contexts("" if was_current else before.current, left))
    return was_current


def _check(name: str, made: Context) -> None:
    """Refuse an address that is none, and files that cannot be used."""
    try:
        check_address(made.scheduler, "--scheduler")
    except ContextError as error:
        again = f"Type `heterps context set {name} --scheduler HOST:PORT`."
        raise ContextError(f"{error}\n{again}") from None
    if made.token_file and not made.ca:
        raise ContextError(
            "--token-file: a token travels under TLS alone; expected --ca FILE with it\n"
            f"Type `heterps context set {name} --ca FILE --token-file FILE`."
        )
    try:
        security.Security.from_files(
            made.files(), lambda variable: f"--{KEYS[variable].replace('_', '-')}"
        )
    except security.SecurityError as error:
        raise ContextError(
            f"{error}\nCopy the files that `heterps certs` made for the cluster, then type "
            f"`heterps context set {name}` with them."
        ) from None


def _check_name(name: str) -> None:
    """Refuse names that would be awkward to type, and the one that is taken."""
    if name == LOCAL:
        raise ContextError(
            f"{name!r} always means the cluster of `heterps up`; expected another name\n"
            "Type `heterps context set NAME --scheduler HOST:PORT`."
        )
    if not _NAME.fullmatch(name):
        raise ContextError(
            f"context {name!r}: expected up to 63 letters, digits, '.', '_' and '-', the first a "
            "letter or digit\nType `heterps context set NAME --scheduler HOST:PORT`."
        )


def check_address(text: str, source: str) -> None:
    """Refuse what is no host:port.

    Raises:
        ContextError: names `source` and the value.
    """
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", " ")
    if not bare or " " in bare or not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ContextError(f"{source}: got {text!r}, expected HOST:PORT, such as 10.0.0.5:7000")


def _read(root: MappingNode) -> Contexts:
    current, named = "", {}
    for key, value in yaml_nodes.pairs(root):
        if key.value == "current":
            current = _text(value, "current")
        elif key.value == "contexts":
            for name, entry in yaml_nodes.pairs(_mapping(value, "contexts")):
                named[name.value] = _context(_mapping(entry, f"contexts.{name.value}"), name.value)
        else:
            raise _unknown(key, "", ["current", "contexts"])
    return Contexts(current, named)


def _context(node: MappingNode, name: str) -> Context:
    values = {}
    for key, value in yaml_nodes.pairs(node):
        if key.value not in _FIELDS:
            raise _unknown(key, f"contexts.{name}.", _FIELDS)
        values[key.value] = _text(value, f"contexts.{name}.{key.value}")
    where = f"{yaml_nodes.place(node)}: contexts.{name}.scheduler"
    check_address(values.get("scheduler", ""), where)
    return Context(**values)


def _mapping(node: Node, key: str) -> MappingNode:
    if isinstance(node, MappingNode):
        return node
    got = yaml_nodes.describe(node)
    raise ContextError(f"{yaml_nodes.place(node)}: {key}: got {got}, expected keys with values")


def _text(node: Node, key: str) -> str:
    if isinstance(node, ScalarNode):
        return "" if node.tag == yaml_nodes.NULL else str(node.value)
    got = yaml_nodes.describe(node)
    raise ContextError(f"{yaml_nodes.place(node)}: {key}: got {got}, expected text")


def _unknown(key: Node, prefix: str, expected: list[str]) -> ContextError:
    at = f"{yaml_nodes.place(key)}: {prefix}{key.value}"
    if key.value == "token":  # its value is a secret and must not be shown
        return ContextError(f"{at}: a token does not belong here; expected token_file: PATH")
    return ContextError(f"{at}: unknown key; expected one of {', '.join(expected)}")


@contextlib.contextmanager
def _editing() -> Iterator[Contexts]:
    """What the file holds, while no other process changes it."""
    home().mkdir(parents=True, exist_ok=True)
    with (home() / "contexts.lock").open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield load()


def _write(made: Contexts) -> None:
    """Write the file, 0600 from its first byte; a reader never sees a half of it."""
    import yaml

    entries = {
        name: {key: value for key, value in asdict(one).items() if value}
        for name, one in sorted(made.named.items())
    }
    text = yaml.safe_dump({"current": made.current, "contexts": entries}, sort_keys=False)
    replace_file(path(), text, private=True, durable=True)
