"""Operations that change a tensor in place, which a cut between its users would undo."""

from torch import Tensor, fx, nn

from workers.model.chain.sizes import REMADE
from workers.model.code.entry import ModelError


def check_in_place(model: nn.Module, graph: fx.Graph) -> None:
    """Refuse in-place changes of what is used elsewhere, or is an input.

    Raises:
        ModelError: names the operation and what to write in its place.
    """
    for node in graph.nodes:
        changed = node.args[0] if node.args else None
        if not isinstance(changed, fx.Node) or not _in_place(model, node):
            continue
        users = [user for user in changed.users if REMADE not in user.meta]
        if changed.op == "placeholder" or len(users) > 1:
            raise ModelError(told_in_place(model, node, changed))


def told_in_place(model: nn.Module, node: fx.Node, changed: fx.Node) -> str:
    """That an operation changes what it may not, and what to write in its place."""
    return (
        f"{type(model).__name__}: {str(node.target)!r} changes {changed.name!r} in place, which "
        f"is {'an input' if changed.op == 'placeholder' else 'used elsewhere'}; expected "
        "an operation that makes a new tensor, such as\n"
        "    x = x.mul(2)    # not x.mul_(2)\n"
        "    nn.ReLU()       # not nn.ReLU(inplace=True)"
    )


def may_change(model: nn.Module, node: fx.Node) -> bool:
    """Whether an operation may change what it takes in place: code of others may do anything."""
    if node.op != "call_module":
        return _in_place(model, node)
    return any(
        not type(module).__module__.startswith("torch.nn.")
        or getattr(module, "inplace", False) is True
        for module in model.get_submodule(str(node.target)).modules()
    )


def copied(value: object) -> object:
    """A copy of a tensor; what is none, which crosses no cut, as it is."""
    return value.clone() if isinstance(value, Tensor) else value


def _in_place(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return getattr(model.get_submodule(str(node.target)), "inplace", False) is True
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.op == "call_function" and node.kwargs.get("inplace") is True
