"""YAML as people write it, and within bounds: nobody's file makes a process eat its memory."""

import re
from typing import Final

import yaml
from yaml.composer import ComposerError

MOST_VALUES: Final = 250_000  # of a text, each counted as often as an alias stands for it
DEEPEST: Final = 100  # of values in values
# What reading may end in: constructors of explicit tags raise whatever they come upon.
READING_ERRORS: Final = (
    *(yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)


class YamlLoader(yaml.SafeLoader):
    """Safe YAML that takes 1e-3 for a number, as everybody but YAML 1.1 does.

    Raises:
        ComposerError: more than `MOST_VALUES`, nested beyond `DEEPEST`, or an alias inside of
            what it stands for.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values: dict[int, int] = {}  # below each node, itself included
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read a node and all below it."""
        alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ComposerError(None, None, f"values nested beyond {DEEPEST}", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        values = self._values.get(id(node))
        if values is None:
            if alias:
                raise ComposerError(None, None, "an alias of what it is in", node.start_mark)
            values = 1
            if isinstance(node, yaml.SequenceNode):
                values += sum(self._values[id(item)] for item in node.value)
            elif isinstance(node, yaml.MappingNode):
                values += sum(self._values[id(part)] for pair in node.value for part in pair)
            self._values[id(node)] = values
        if values > MOST_VALUES:
            problem = f"more than {MOST_VALUES} values, aliases counted"
            raise ComposerError(None, None, problem, node.start_mark)
        return node


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
