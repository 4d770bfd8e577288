"""What a forward asks of a tensor besides its values, such as its shape.

A cut is crossed by tensors alone, so a stage that needs a size asks the tensor for it again.
"""

import operator
from typing import Final

from torch import fx

REMADE: Final = "heterps_remade"  # in the meta of a node that every stage makes for itself
_ATTRIBUTES = frozenset(("device", "dtype", "ndim", "shape"))
_METHODS = frozenset(("dim", "ndimension", "numel", "size"))
_OF_SIZES = frozenset(
    (
        *(operator.add, operator.floordiv, operator.getitem, operator.mod, operator.mul),
        *(operator.neg, operator.pow, operator.sub, operator.truediv),
    )
)


def mark_sizes(graph: fx.Graph) -> None:
    """Mark what is asked of tensors as remade, and what is computed of that alone."""
    sizes: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        asked = len(inputs) == 1 and inputs[0].op != "get_attr" and _asks(node)
        if asked or (inputs and sizes.issuperset(inputs) and node.target in _OF_SIZES):
            sizes.add(node)
            node.meta[REMADE] = True


def _asks(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _METHODS
    return node.target is getattr and node.args[1] in _ATTRIBUTES
