"""An ordinary `nn.Module` as a chain of layers that can be cut into stages.

The model is traced once with `torch.fx`; every direct child call is a layer. Operations
between layers belong to the layer whose result they need last, so that what they shrink is
shrunk before it travels. A cut after a layer is crossed by the values made before it and
used after it, the model's own inputs included.
"""

import inspect
import traceback
from dataclasses import dataclass

from torch import fx, nn

from workers.embedding.sparse import SparseEmbedding
from workers.model.entry import ModelError
from workers.moe.layer import MoE

INPUTS = ("sparse", "dense", "tokens")
_BEFORE_ALL = -1


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One direct child of the model: its attribute name and what it is."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class StageGraph:
    """A run of layers as a module of its own.

    `module(*[values[n] for n in inputs])` returns a tuple in the order of `outputs`; in the
    last stage that is the model's result alone.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    keys_of: dict[str, str]  # SparseEmbedding layer -> model input that holds its keys


class _DirectChildren(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class TracedModel:
    """The layers of a model and the stages that can be cut from it.

    Raises:
        ModelError: the forward cannot be traced or cut; says where and what to change.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._check_signature()
        self._graph = self._trace()
        self.layers: tuple[LayerInfo, ...] = ()
        self._index: dict[fx.Node, int] = {}
        self._assign()
        self._keys = self._find_keys()

    def stage(self, first: int, last: int) -> StageGraph:
        """The module of layers `first` to `last`, inclusive."""
        final = last == len(self.layers) - 1
        inputs = self.crossing(first - 1)
        outputs = () if final else self.crossing(last)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        by_name = {node.name: node for node in self._graph.nodes}
        for name in inputs:
            copies[by_name[name]] = graph.placeholder(name)
        for node in self._graph.nodes:
            if node.op in ("call_module", "call_function", "call_method") and (
                first <= self._index[node] <= last
            ):
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        if final:
            result = self._result()
            graph.output((copies[result],))
            names: tuple[str, ...] = (result.name,)
        else:
            graph.output(tuple(copies[by_name[name]] for name in outputs))
            names = outputs
        run = {layer.name for layer in self.layers[first : last + 1]}
        keys = {layer: source for layer, source in self._keys.items() if layer in run}
        return StageGraph(fx.GraphModule(self.model, graph), inputs, names, keys)

    def crossing(self, after: int) -> tuple[str, ...]:
        """Names of the values alive between layer `after` and the next; -1: the inputs used."""
        names = []
        for node in self._graph.nodes:
            made = _BEFORE_ALL if node.op == "placeholder" else self._index.get(node)
            if made is None or made > after:
                continue
            if any(self._use(user) > after for user in node.users):
                names.append(node.name)
        return tuple(names)

    def _use(self, user: fx.Node) -> int:
        return len(self.layers) - 1 if user.op == "output" else self._index[user]

    def _check_signature(self) -> None:
        for name in inspect.signature(self.model.forward).parameters:
            if name not in INPUTS:
                raise ModelError(
                    f"{self._where()}: forward takes {name!r}; expected only {', '.join(INPUTS)}"
                )
        own = [name for name, _ in self.model.named_parameters(recurse=False)]
        own += [name for name, _ in self.model.named_buffers(recurse=False)]
        if own:
            raise ModelError(
                f"{self._where()}: {own[0]!r} belongs to the model itself and so to no layer; "
                "move it into a child module"
            )

    def _trace(self) -> fx.Graph:
        try:
            return _DirectChildren().trace(self.model)
        except Exception as error:
            file = inspect.getsourcefile(type(self.model)) or ""
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
            at = f"{file}:{frames[-1].lineno}: {frames[-1].line}" if frames else self._where()
            raise ModelError(
                f"the model cannot be traced at {at}: {type(error).__name__}: {error}; forward may "
                "call its direct children and tensor operations; Python control flow that depends "
                "on tensor values belongs inside a child module"
            ) from error

    def _assign(self) -> None:
        layers: list[LayerInfo] = []
        for node in self._graph.nodes:
            if node.op == "get_attr":
                raise ModelError(
                    f"{self._where()}: forward reads {node.target!r} directly; "
                    "move it into a child module"
                )
            if node.op in ("placeholder", "output"):
                continue
            if node.op == "call_module":
                name = str(node.target)
                if "." in name or name in {layer.name for layer in layers}:
                    raise ModelError(
                        f"{self._where()}: {name!r} is "
                        + ("not a direct child" if "." in name else "called twice")
                        + "; a layer is a direct child that forward calls once"
                    )
                layers.append(LayerInfo(name, kind_of(self.model.get_submodule(name))))
                self._index[node] = len(layers) - 1
            else:
                self._index[node] = max(
                    (self._index.get(n, _BEFORE_ALL) for n in node.all_input_nodes),
                    default=_BEFORE_ALL,
                )
        if not layers:
            raise ModelError(
                f"{self._where()}: forward calls no child module, so there is no layer"
            )
        self.layers = tuple(layers)
        # What is made of inputs alone is made where it is first needed.
        for node in reversed(self._graph.nodes):
            if self._index.get(node) == _BEFORE_ALL:
                self._index[node] = min((self._use(u) for u in node.users), default=0)

    def _find_keys(self) -> dict[str, str]:
        keys: dict[str, str] = {}
        for node in self._graph.nodes:
            if node.op != "call_module":
                continue
            if isinstance(self.model.get_submodule(str(node.target)), SparseEmbedding):
                source = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
                if not isinstance(source, fx.Node) or source.op != "placeholder":
                    raise ModelError(
                        f"{self._where()}: {node.target!r} must be given a model input as it is, "
                        "so that its rows can be pulled before the step; select slots inside it"
                    )
                keys[str(node.target)] = source.name
        return keys

    def _result(self) -> fx.Node:
        output = next(node for node in self._graph.nodes if node.op == "output")
        result = output.args[0]
        if not isinstance(result, fx.Node):
            raise ModelError(f"{self._where()}: forward must return one tensor, the prediction [B]")
        return result

    def _where(self) -> str:
        return type(self.model).__name__


def kind_of(layer: nn.Module) -> str:
    """The kind of a layer, as the scheduler's features name it."""
    if isinstance(layer, SparseEmbedding):
        return "embedding"
    if any(isinstance(m, MoE) for m in layer.modules()):
        return "moe"
    if any(isinstance(m, nn.MultiheadAttention) for m in layer.modules()):
        return "attention"
    if any(isinstance(m, nn.modules.conv._ConvNd) for m in layer.modules()):
        return "convolution"
    if any(True for _ in layer.parameters()):
        return "dense"
    return "elementwise"
