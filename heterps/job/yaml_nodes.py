"""YAML as a tree of nodes that know the line they stand on."""

from pathlib import Path
from typing import Any

import yaml
from yaml import MappingNode, Node, ScalarNode

from chassis.yaml_loader import READING_ERRORS, YamlLoader

_SET = "--set "
_STR = "tag:yaml.org,2002:str"
_MAP = "tag:yaml.org,2002:map"
NULL = "tag:yaml.org,2002:null"


class YamlError(ValueError):
    """Text that is no YAML, or an override that has no place; names where."""


def read(path: Path, shown: str) -> MappingNode:
    """The mapping that a YAML file holds.

    Args:
        shown: how the file is named in errors.

    Raises:
        YamlError: it cannot be read, or is not a YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise YamlError(f"{shown}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise YamlError(f"{shown}: cannot be read: expected UTF-8 text") from None
    node = _compose(text, shown)
    if node is None:
        raise YamlError(f"{shown}: the file is empty; expected name:, model:, data:, …")
    if not isinstance(node, MappingNode):
        raise YamlError(
            f"{place(node)}: expected a mapping of keys to values, such as name: flights"
        )
    return node


def override(root: MappingNode, assignment: str) -> None:
    """Put `a.b=value` into the tree, the value read as YAML.

    Raises:
        YamlError: it is no assignment, or runs through a value that has no keys.
    """
    name = _SET + assignment
    key, equals, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise YamlError(f"{name}: expected KEY=VALUE, such as --set train.epochs=3")
    value = _compose(text, name) or ScalarNode(NULL, "", *_marks(name))
    node = root
    for depth, part in enumerate(parts[:-1], 1):
        child = _child(node, part)
        if child is None or child.tag == NULL:
            child = MappingNode(_MAP, [], *_marks(name))
            _put(node, part, child, name)
        if not isinstance(child, MappingNode):
            inner = ".".join(parts[:depth])
            raise YamlError(f"{name}: {inner} is {describe(child)}, it has no keys")
        node = child
    _put(node, parts[-1], value, name)


def pairs(node: MappingNode) -> list[tuple[Node, Node]]:
    """Keys and values, with merge keys (`<<`) resolved.

    Raises:
        YamlError: what is to be merged is no mapping.
    """
    try:
        YamlLoader("").flatten_mapping(node)
    except yaml.MarkedYAMLError as error:
        raise YamlError(f"{place(node)}: {error.problem}") from None
    return list(node.value)


def plain(node: Node) -> Any:
    """The ordinary Python value of a node.

    Raises:
        YamlError: it holds a tag or an alias that has no plain value.
    """
    try:
        return YamlLoader("").construct_object(node, deep=True)
    except READING_ERRORS as error:
        reason = getattr(error, "problem", None) or str(error)
        raise YamlError(f"{place(node)}: {reason}") from None


def place(node: Node) -> str:
    """FILE:LINE of a node, or the --set it came from."""
    mark = node.start_mark
    return str(mark.name) if mark.name.startswith(_SET) else f"{mark.name}:{mark.line + 1}"


def describe(node: Node) -> str:
    """A value as a user would recognise it, on one line."""
    if isinstance(node, ScalarNode):
        if node.tag == NULL:
            return "nothing"
        return repr(node.value) if node.tag == _STR else str(node.value)
    kind = "a mapping" if isinstance(node, MappingNode) else "a list"
    return kind if node.value else f"an empty {kind[2:]}"


def _compose(text: str, name: str) -> Node | None:
    try:
        loader = YamlLoader(text)
        loader.name = name
        node: Node | None = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f":{mark.line + 1}" if mark is not None and not name.startswith(_SET) else ""
        raise YamlError(f"{name}{at}: not valid YAML: {error.problem or error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise YamlError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    return node


def _marks(name: str) -> tuple[yaml.Mark, yaml.Mark]:
    mark = yaml.Mark(name, 0, 0, 0, "", 0)
    return mark, mark


def _child(node: MappingNode, name: str) -> Node | None:
    return next((value for key, value in node.value if key.value == name), None)


def _put(node: MappingNode, name: str, value: Node, source: str) -> None:
    kept = [(key, old) for key, old in node.value if key.value != name]
    node.value = [*kept, (ScalarNode(_STR, name, *_marks(source)), value)]
