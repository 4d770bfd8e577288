"""Reading a YAML tree into a protobuf message: the message is the schema.

Every key is a field's name; what does not fit is collected as problems, each with its line, so
that a user sees all of them at once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from yaml import MappingNode, Node, ScalarNode, SequenceNode

from chassis.near import nearest
from heterps.job import yaml_nodes
from heterps.job.yaml_nodes import NULL, YamlError, describe, place
from protos.naming import field_name

# The stubs of protobuf give a descriptor two types, that of its C core included.
Descriptor = Any
_STRUCT = Struct.DESCRIPTOR.full_name
_INTEGERS = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
}
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_EXACT = 2**53  # whole numbers up to here survive as doubles


@dataclass(slots=True)
class Reading:
    """What came of reading one tree.

    Args:
        hidden: dotted keys that exist in the message but not in the file.
        nullable: dotted keys whose null is as if they were not given.
    """

    hidden: frozenset[str]
    nullable: frozenset[str] = frozenset()
    problems: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)  # FILE:LINE by dotted key that was given

    def into(self, message: Message, node: MappingNode, path: str = "") -> None:
        """Fill `message` from the mapping `node`, which stands at the dotted key `path`."""
        fields = {field_name(f): f for f in _fields(message.DESCRIPTOR, path, self.hidden)}
        for name, key, value in self._unique(node, path):
            dotted = _join(path, name)
            if name not in fields:
                self._problem(key, dotted, f"unknown key; {self._hint(message, path, name)}")
                continue
            self.places[dotted] = place(key)
            self._fill(message, fields[name], value, dotted)

    def _unique(self, node: MappingNode, path: str) -> Iterator[tuple[str, Node, Node]]:
        """The entries of a mapping with text keys, each once."""
        seen: dict[str, str] = {}
        for key, value in yaml_nodes.pairs(node):
            if not isinstance(key, ScalarNode):
                self._problem(key, path, "expected text as a key")
            elif key.value in seen:
                text = f"given twice; the first is at {seen[key.value]}"
                self._problem(key, _join(path, key.value), text)
            else:
                seen[key.value] = place(key)
                yield str(key.value), key, value

    def _fill(self, message: Message, spec: FieldDescriptor, node: Node, path: str) -> None:
        kind = spec.message_type
        if kind is not None and kind.GetOptions().map_entry:
            self._mapping(getattr(message, spec.name), kind, node, path)
        elif spec.is_repeated:
            self._list(getattr(message, spec.name), spec, node, path)
        elif kind is not None and kind.full_name == _STRUCT:
            self._struct(getattr(message, spec.name), node, path)
        elif kind is not None:
            if node.tag == NULL:  # all of its keys are commented out
                return
            if isinstance(node, MappingNode):
                self.into(getattr(message, spec.name), node, path)
            else:
                names = ", ".join(field_name(f) for f in _fields(kind, path, self.hidden))
                self._wrong(node, path, f"a mapping with keys of {names}")
        elif node.tag != NULL or path not in self.nullable:
            value = self._scalar(spec, node, path)
            if value is not None:
                setattr(message, spec.name, value)

    def _mapping(self, target: Any, entry: Descriptor, node: Node, path: str) -> None:
        if node.tag == NULL:
            return
        if not isinstance(node, MappingNode):
            self._wrong(node, path, "a mapping of names to text")
            return
        spec = entry.fields_by_name["value"]
        for name, key, child in self._unique(node, path):
            if spec.message_type is not None:
                self.places[_join(path, name)] = place(key)
                self._fill_entry(target[name], child, _join(path, name))
                continue
            if isinstance(child, MappingNode):  # of a name with a dot, as --set writes it
                nested: dict[str, Any] = {}
                self._mapping(nested, entry, child, _join(path, name))
                for rest, value in nested.items():
                    target[f"{name}.{rest}"] = value
                continue
            value = self._scalar(spec, child, _join(path, name))
            self.places[_join(path, name)] = place(key)
            if value is not None:
                target[name] = value

    def _fill_entry(self, message: Message, node: Node, path: str) -> None:
        if isinstance(message, Struct):
            self._struct(message, node, path)
        elif isinstance(node, MappingNode):
            self.into(message, node, path)
        else:
            names = ", ".join(field_name(f) for f in _fields(message.DESCRIPTOR, path, self.hidden))
            self._wrong(node, path, f"a mapping with keys of {names}")

    def _list(self, target: Any, spec: FieldDescriptor, node: Node, path: str) -> None:
        if node.tag == NULL:
            return
        if not isinstance(node, SequenceNode):
            self._wrong(node, path, f"a list, such as [{describe(node).strip(chr(39))}]")
            return
        for index, child in enumerate(node.value):
            if spec.message_type is not None:
                self._fill_entry(target.add(), child, f"{path}[{index}]")
                continue
            value = self._scalar(spec, child, f"{path}[{index}]")
            if value is not None:
                target.append(value)

    def _struct(self, target: Struct, node: Node, path: str) -> None:
        if node.tag == NULL:
            return
        if not isinstance(node, MappingNode):
            self._wrong(node, path, "a mapping of argument names to values")
            return
        try:
            value = yaml_nodes.plain(node)
        except YamlError as error:
            self.problems.append(f"{error}")
            return
        bad = next(_not_json(value, path), None)
        if bad is not None:
            self._problem(node, *bad)
        else:
            target.update(value)

    def _scalar(self, spec: FieldDescriptor, node: Node, path: str) -> Any:
        """The value of a field, None where it is wrong."""
        kind = spec.cpp_type
        scalar = isinstance(node, ScalarNode) and _known(node)
        value: Any = yaml_nodes.plain(node) if scalar else node
        expected = "text"
        if kind in _INTEGERS:
            low, high = _INTEGERS[kind]
            expected = f"a whole number of at least {low}"
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool):
                if low <= value <= high:
                    return value
                expected = f"a whole number from {low} to {high}"
        elif kind in _FLOATS:
            expected = "a number"
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and math.isfinite(value):
                return float(value)
        elif kind == FieldDescriptor.CPPTYPE_BOOL:
            expected = "true or false"
            if isinstance(value, bool):
                return value
        elif isinstance(value, str):
            if value.strip():
                return value
            expected = "text that is not empty"
        elif isinstance(node, ScalarNode) and node.tag != NULL:
            expected = f'text; in quotes it is: "{node.value}"'
        self._wrong(node, path, expected)
        return None

    def _wrong(self, node: Node, path: str, expected: str) -> None:
        self._problem(node, path, f"got {describe(node)}, expected {expected}")

    def _problem(self, node: Node, path: str, text: str) -> None:
        self.problems.append(f"{place(node)}: {path}: {text}")

    def _hint(self, message: Message, path: str, name: str) -> str:
        here = [field_name(f) for f in _fields(message.DESCRIPTOR, path, self.hidden)]
        near = nearest(name, here)
        if not near:  # perhaps it belongs somewhere else
            root = message.DESCRIPTOR.file.message_types_by_name["JobSpec"]
            everywhere = list(dotted_keys(root, self.hidden))
            last = nearest(name, [key.rpartition(".")[2] for key in everywhere], cutoff=0.8)
            near = next((key for key in everywhere if last and key.endswith(f".{last}")), "")
        else:
            near = _join(path, near)
        where = f"of {path}" if path else "at the top"
        hint = f"did you mean {near}? " if near else ""
        return f"{hint}valid keys {where}: {', '.join(here)}"


def dotted_keys(kind: Descriptor, hidden: frozenset[str], path: str = "") -> Iterator[str]:
    """Every key that a file may hold, as dotted paths."""
    for spec in _fields(kind, path, hidden):
        dotted = _join(path, field_name(spec))
        yield dotted
        inner = spec.message_type
        if inner is not None and not spec.is_repeated and inner.full_name != _STRUCT:
            yield from dotted_keys(inner, hidden, dotted)


def field_at(kind: Descriptor, path: str) -> Descriptor | None:
    """The field that a dotted key names; None where there is none, or it is of no type of its own.

    Args:
        path: through messages and entries of maps, whose names have no dot.
    """
    name, _, rest = path.partition(".")
    spec = next((one for one in kind.fields if field_name(one) == name), None)
    inner = spec.message_type if spec is not None else None
    if inner is not None and inner.GetOptions().map_entry:
        spec = inner.fields_by_name["value"]
        inner, rest = spec.message_type, rest.partition(".")[2]
    if not rest:
        return spec
    return field_at(inner, rest) if inner is not None and inner.full_name != _STRUCT else None


def is_whole(spec: Descriptor) -> bool:
    """Whether a field holds whole numbers."""
    return spec.cpp_type in _INTEGERS


def _fields(kind: Descriptor, path: str, hidden: frozenset[str]) -> list[FieldDescriptor]:
    return [f for f in kind.fields if _join(path, field_name(f)) not in hidden]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _known(node: ScalarNode) -> bool:
    """Whether the scalar is of an ordinary tag: dates are left to be refused as they are."""
    return node.tag.rpartition(":")[2] in ("str", "int", "float", "bool", "null")


def _not_json(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Values that a job cannot carry, with what to do about them."""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _not_json(item, _join(path, key))
            else:
                yield path, f"got the key {key!r}, expected text"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_json(item, f"{path}[{index}]")
    elif isinstance(value, bool | str) or value is None:
        return
    elif isinstance(value, int) and abs(value) > _EXACT:
        yield path, f'got {value}, expected at most 2^53; in quotes it stays exact: "{value}"'
    elif not isinstance(value, int | float) or not math.isfinite(value):
        yield path, f"got {value}, expected text, a finite number, true, false, a list or a mapping"
