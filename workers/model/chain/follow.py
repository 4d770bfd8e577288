"""A forward followed by running it on tensors that have shapes and no values.

For models that `torch.fx` cannot trace, since their Python asks shapes, settings and types what to
do next. Their blocks are left whole: the entries of an `nn.ModuleList`, and each module that has no
such list inside. What is computed between them becomes a graph in which the number of samples is
left open. What is made there of inputs alone, as a mask is, may be made anew wherever it is needed.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn
from torch._ops import OpOverload

from workers.model.chain.sizes import REMADE
from workers.model.code.entry import ModelError
from workers.model.module.inputs import arguments_of

_SAMPLES = (2, 3)  # that a forward is run with
_MOST_CONSTANT = 64  # values of a tensor that a forward makes of numbers
_OF_A_DEVICE = ("device", "pin_memory")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout)

_library = torch.library.Library("heterps_follow", "DEF")
_library.define("called(Tensor[] tensors, SymInt[] sizes, int number) -> Tensor[]")


class Followed(nn.Module):
    """A model that is followed and not traced."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a tensor, or a size, of a call."""

    number: int
    size: bool = False


@dataclass(frozen=True, slots=True)
class _Given:
    """What a block gave.

    Attributes:
        result: with slots for tensors.
        paths: where in it each is.
        shapes, dtypes: of each.
    """

    block: str
    result: Any
    paths: tuple[tuple[Any, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


class _Calls:
    """The calls of a model's blocks, in their order.

    Args:
        given: what they gave for each of `_SAMPLES`; none: to be found out.
    """

    def __init__(self, model: nn.Module, given: list[list[_Given]] | None = None) -> None:
        self._where = type(model).__name__
        self._names = {id(block): name for name, block in _blocks(model)}
        self._given = given
        self.found: list[_Given] = []
        self.made: list[tuple[str, Any]] = []  # blocks and their arguments
        self.samples: int | SymInt = 0
        self.device = _device_of(model)
        self._inside = False

    def takes(self, module: nn.Module) -> bool:
        """Whether a call of a module is one of these."""
        return not self._inside and id(module) in self._names

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a block, or say what it would give."""
        name = self._names[id(module)]
        if self._given is None:
            return self._run(name, module, args, kwargs)
        tensors: list[Tensor] = []
        sizes: list[Any] = []
        number = len(self.made)
        self.made.append((name, _slotted((args, kwargs), name, tensors, sizes)))
        if number >= len(self._given[0]) or self._given[0][number].block != name:
            raise ModelError(
                f"{self._where}: forward calls {name!r} depending on values; expected the same "
                "calls for all inputs"
            )
        tensors = torch.ops.heterps_follow.called(tensors, sizes, number)
        return _filled(self._given[0][number].result, tensors, ())

    def shapes(self, number: int) -> list[tuple[tuple[Any, ...], torch.dtype]]:
        """Of the tensors that a call gives."""
        assert self._given is not None
        few, more = (given[number] for given in self._given)
        pairs = zip(few.shapes, more.shapes, strict=True)
        return [
            (tuple(map(self._size, *pair)), dtype)
            for pair, dtype in zip(pairs, few.dtypes, strict=True)
        ]

    def paths(self, number: int) -> tuple[tuple[Any, ...], ...]:
        """Where in what a call gives its tensors are."""
        assert self._given is not None
        return self._given[0][number].paths

    def _size(self, few: int, more: int) -> int | SymInt:
        if few == more:
            return few
        times, rest = divmod(few, _SAMPLES[0])
        if rest or more != times * _SAMPLES[1]:
            raise ModelError(
                f"{self._where}: a block gives {few} values for {_SAMPLES[0]} samples and {more} "
                f"for {_SAMPLES[1]}; expected as many for each sample"
            )
        return times * self.samples

    def _run(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._inside = True
        try:
            result = module(*args, **kwargs)
        finally:
            self._inside = False
        tensors: list[Tensor] = []
        paths: list[tuple[Any, ...]] = []
        slotted = _slotted(result, name, tensors, None, paths)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        dtypes = tuple(tensor.dtype for tensor in tensors)
        self.found.append(_Given(name, slotted, tuple(paths), shapes, dtypes))
        return result


_current: ContextVar[_Calls | None] = ContextVar("calls", default=None)


def _given_by(tensors: list[Tensor], sizes: list[Any], number: int) -> list[Tensor]:
    calls = _current.get()
    assert calls is not None
    return [
        torch.empty(shape, dtype=dtype, device=calls.device)
        for shape, dtype in calls.shapes(number)
    ]


torch.library.register_fake("heterps_follow::called", _given_by, lib=_library)


@torch.no_grad()
def followed(model: nn.Module, inputs: Mapping[str, Tensor]) -> fx.Graph:
    """The graph of a forward in the mode that the model is in, its blocks called whole.

    It is run with a few samples first, to see what its blocks give.

    Args:
        inputs: by name, of any number of samples: their shapes and types.

    Raises:
        ModelError: what the forward does depends on values or on the number of samples, or is
            nothing that a graph can say.
    """
    # They come with SymPy, which other models do not need.
    from torch.fx.experimental.proxy_tensor import make_fx

    parameters = inspect.signature(model.forward).parameters

    def forward(calls: _Calls, *tensors: Tensor) -> Any:
        calls.samples = tensors[0].shape[0]
        with _left_whole(calls):
            return model(**arguments_of(parameters, dict(zip(inputs, tensors, strict=True))))

    given = []
    for samples in _SAMPLES:
        calls = _Calls(model)
        with torch.random.fork_rng(devices=[]):
            forward(calls, *_examples(model, inputs, samples))
        given.append(calls.found)
    if [one.block for one in given[0]] != [one.block for one in given[1]]:
        raise _of_samples(model)
    calls = _Calls(model, given)
    trace = make_fx(
        lambda *tensors: forward(calls, *tensors),
        tracing_mode="symbolic",
        _allow_non_fake_inputs=True,
    )
    widths = {size for tensor in inputs.values() for size in tensor.shape[1:]}
    samples = next(n for n in range(_SAMPLES[0], len(widths) + 3) if n not in widths)
    module = trace(*_examples(model, inputs, samples))
    taken = [node for node in module.graph.nodes if node.op == "placeholder"]
    used = {name: node for name, node in zip(inputs, taken, strict=True) if node.users}
    for name in used:
        if 0 in inputs[name].shape[1:]:
            raise ModelError(
                f"{type(model).__name__}: forward reads {name!r}, whose width is not known before "
                "there is data; expected inputs of data.columns"
            )
    if not _is_open(used, inputs):
        raise _of_samples(model)
    return _Rebuilt(model, module, list(inputs), calls).graph


def _is_open(used: Mapping[str, fx.Node], inputs: Mapping[str, Tensor]) -> bool:
    """Whether a graph is that of any number of samples: nothing asked of it has two answers."""
    from torch.fx.experimental.symbolic_shapes import free_symbols, is_concrete_int

    shapes = {name: node.meta["val"].shape for name, node in used.items()}
    widths = {
        symbol: width
        for name, shape in shapes.items()
        for size, width in zip(shape[1:], inputs[name].shape[1:], strict=True)
        for symbol in free_symbols(size)
    }
    for samples, *_ in shapes.values():
        if is_concrete_int(samples):
            return False
        env = samples.node.shape_env
        asked = (env.replace(guard.expr).xreplace(widths) for guard in env.guards)
        if any(free_symbols(samples) & one.free_symbols for one in asked):
            return False
    return True


def _examples(model: nn.Module, inputs: Mapping[str, Tensor], samples: int) -> list[Tensor]:
    device = _device_of(model)
    return [
        torch.ones((samples, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
        for tensor in inputs.values()
    ]


def _device_of(model: nn.Module) -> torch.device:
    return next((one.device for one in model.parameters()), torch.device("cpu"))


def _of_samples(model: nn.Module) -> ModelError:
    return ModelError(
        f"{type(model).__name__}: what forward does depends on how many samples there are; "
        "expected the same for any number, which x.shape[0] leaves open and len(x) does not"
    )


@contextmanager
def _left_whole(calls: _Calls) -> Iterator[None]:
    before = nn.Module.__call__

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _current.get() is calls and calls.takes(module):
            return calls.call(module, args, kwargs)
        return before(module, *args, **kwargs)

    token = _current.set(calls)
    nn.Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = before  # type: ignore[method-assign]
        _current.reset(token)


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that are left whole, by their dotted names."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            yield from ((f"{path}.{key}", block) for key, block in child.named_children())
        elif any(isinstance(one, nn.ModuleList) for one in child.modules()):
            yield from _blocks(child, f"{path}.")
        else:
            yield path, child


def _slotted(
    value: Any,
    block: str,
    tensors: list[Tensor],
    sizes: list[Any] | None,
    paths: list[tuple[Any, ...]] | None = None,
    path: tuple[Any, ...] = (),
) -> Any:
    """A value with slots for its tensors and sizes, which are collected."""

    def inner(key: Any, one: Any) -> Any:
        return _slotted(one, block, tensors, sizes, paths, (*path, key))

    if isinstance(value, Tensor):
        tensors.append(value)
        if paths is not None:
            paths.append(path)
        return _Slot(len(tensors) - 1)
    if isinstance(value, SymInt) and sizes is not None:
        sizes.append(value)
        return _Slot(len(sizes) - 1, size=True)
    if isinstance(value, tuple | list):
        return type(value)([inner(key, one) for key, one in enumerate(value)])
    if isinstance(value, Mapping):
        return type(value)(**{key: inner(key, one) for key, one in value.items()})
    if isinstance(value, _PLAIN):
        return value
    raise ModelError(
        f"{block!r} takes or gives a {type(value).__name__}, which cannot cross from stage to "
        "stage; expected tensors, numbers and names, in lists, tuples or dicts"
    )


def _filled(value: Any, tensors: Any, sizes: Any) -> Any:
    """A value with its slots filled."""
    if isinstance(value, _Slot):
        return (sizes if value.size else tensors)[value.number]
    if isinstance(value, tuple | list):
        return type(value)([_filled(one, tensors, sizes) for one in value])
    if isinstance(value, Mapping):
        return type(value)(**{key: _filled(one, tensors, sizes) for key, one in value.items()})
    return value


class _Rebuilt:
    """What was recorded, as a graph of the model.

    Inputs go by their names, blocks are called, parameters are read where the model has them, and
    what was made on this device is made on that of the inputs.
    """

    def __init__(
        self, model: nn.Module, module: fx.GraphModule, inputs: list[str], calls: _Calls
    ) -> None:
        self.graph = fx.Graph()
        self._where = type(model).__name__
        self._module, self._calls = module, calls
        state = (*model.named_parameters(), *model.named_buffers())
        self._state = {id(tensor): name for name, tensor in state}
        self._values: dict[fx.Node, Any] = {}
        self._given: dict[fx.Node, list[fx.Node]] = {}  # by call of a block, the tensors it gives
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        for node, name in zip(placeholders, inputs, strict=True):
            if node.users:
                self._values[node] = self.graph.placeholder(name)
        if not self._values:
            raise ModelError(f"{self._where}: forward reads none of {', '.join(inputs)}")
        self._beside = next(iter(self._values.values()))
        for node in module.graph.nodes:
            if node.op == "output":
                self.graph.output(self._of(node.args[0]))
            elif node.op != "placeholder":
                self._add(node)

    def _of(self, value: Any) -> Any:
        return fx.map_arg(value, lambda node: self._values[node])

    def _add(self, node: fx.Node) -> None:
        if node.target is torch.ops.heterps_follow.called.default:
            self._given[node] = self._block(*self._of(node.args))
            return
        if node.op == "call_function" and node.args and node.args[0] in self._given:
            block: Any = node.args[0]
            at: Any = node.args[1]
            self._values[node] = self._given[block][at]
            return
        made = self._read(node) if node.op == "get_attr" else self._computed(node)
        made.meta.clear()
        inputs = made.all_input_nodes
        alone = all(one.op == "placeholder" or REMADE in one.meta for one in inputs)
        if made.op == "call_function" and alone and not _draws(node.target):
            made.meta[REMADE] = True
        self._values[node] = made

    def _computed(self, node: fx.Node) -> fx.Node:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            raise ModelError(
                f"{self._where}: between its blocks forward changes a tensor in place, by "
                f"{node.target}; expected an operation that makes a new one"
            )
        if "device" not in node.kwargs:
            return self.graph.node_copy(node, lambda n: self._values[n])
        kwargs = {name: value for name, value in node.kwargs.items() if name not in _OF_A_DEVICE}
        arguments = (self._beside, node.target, *self._of(node.args))
        return self.graph.call_function(made_beside, arguments, self._of(kwargs))

    def _read(self, node: fx.Node) -> fx.Node:
        """A parameter or buffer of the model, or a constant that forward makes."""
        tensor = getattr(self._module, str(node.target))
        if (name := self._state.get(id(tensor))) is not None:
            return self.graph.create_node("get_attr", name)
        if tensor.numel() > _MOST_CONSTANT:
            raise ModelError(
                f"{self._where}: between its blocks forward reads a tensor {list(tensor.shape)} "
                "that is neither a parameter nor a buffer; expected one of these"
            )
        arguments = (self._beside, tensor.tolist(), tensor.dtype)
        return self.graph.call_function(constant_beside, arguments)

    def _block(self, tensors: list[Any], sizes: list[Any], number: int) -> list[fx.Node]:
        """The call of a block; the tensors that it gives."""
        name, arguments = self._calls.made[number]
        args, kwargs = _filled(arguments, tensors, sizes)
        made = self.graph.call_module(name, args, kwargs)
        given = []
        for path in self._calls.paths(number):
            given.append(made)
            for key in path:
                given[-1] = self.graph.call_function(operator.getitem, (given[-1], key))
        return given


def made_beside(beside: Tensor, make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """What an operation makes, on the device of a tensor."""
    return make(*args, **kwargs, device=beside.device)


def constant_beside(beside: Tensor, values: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of numbers, on the device of another one."""
    return torch.tensor(values, dtype=dtype, device=beside.device)


def _draws(target: Any) -> bool:
    tags = target.tags if isinstance(target, OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags
