"""An ordinary `nn.Module` as a chain of layers that can be cut into stages.

The model is traced once with `torch.fx`; every module that its forward calls is a layer. Operations
between layers belong to the layer whose result they need last, so that what they shrink is
shrunk before it travels, and are computed with it wherever the model is cut. A cut after a layer
is crossed by the values made before it and used after it, the model's own inputs included.
Sizes of tensors, and what a `Followed` model makes of inputs alone, are made in every stage that
needs them.
"""

import inspect
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from workers.embedding.sparse import SparseEmbedding
from workers.model.chain.follow import Followed, followed
from workers.model.chain.graph import OWN, RETURNED, StageGraph, StageModule
from workers.model.chain.in_place import check_in_place, copied, may_change
from workers.model.chain.lookups import Lookup, check_tables, find_lookups
from workers.model.chain.sizes import REMADE, mark_sizes
from workers.model.chain.tracer import Tracer
from workers.model.code.entry import ModelError
from workers.model.module.inputs import ALWAYS, BATCH, unpacked
from workers.model.module.modes import in_mode, in_other_mode
from workers.model.module.randomness import Draws, LayerStart
from workers.model.module.sharing import Sharing, check_ties, find_sharing, uncut_of
from workers.model.module.state import check_state
from workers.moe.besides import state_besides
from workers.moe.layer import MoE

_BEFORE_ALL = -1
_COMPUTED = ("call_module", "call_function", "call_method")
_AUXILIARY = """forward sets an aux_loss of the model itself, which no layer has; expected it of a \
child module, such as
    class Small(nn.Module):
        def forward(self, x):
            self.aux_loss = 0.01 * x.square().mean()
            return x"""
_DRAWN = (
    "forward draws a random number in Python between its layers, which would be the same in every "
    "step; expected a draw of a tensor's shape, such as torch.rand_like(x), or one in a child "
    "module"
)
_OWN = """, such as
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
        def forward(self, x):
            return x * self.weight"""


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One module that the model's forward calls: its dotted name and what it is.

    Of a module that is called again, the second call is `name#2`, and so on.
    """

    name: str
    kind: str


class _CalledModules(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class TracedModel:
    """The layers of a model and the stages that can be cut from it.

    Args:
        inputs: what its forward may take, by name: tensors of no samples.

    Attributes:
        layers: in the order of their calls.
        uncut: for each layer, whether it stays in one stage with the next.
        sharing: why.
        graph: of the forward, the modules that it calls left whole.

    Raises:
        ModelError: the forward cannot be traced or cut; says where and what to change.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor] = ALWAYS) -> None:
        self.model = model
        self._inputs = inputs
        self._check_signature()
        check_state(model)
        check_ties(model)
        check_tables(model)
        # A model's own `train` may leave some of its modules in the other mode.
        self._others = {mode: in_other_mode(model, mode) for mode in (True, False)}
        self._drawn: list[Sequence[str]] = []  # from which generators, by forward traced
        self.graph = self._trace(training=True)
        mark_sizes(self.graph)
        self._check_modes()
        self._check_inputs()
        self.layers: tuple[LayerInfo, ...] = ()
        self._index: dict[fx.Node, int] = {}
        self._assign()
        self._results()
        check_in_place(model, self.graph)
        targets = [str(n.target) for n in self.graph.nodes if n.op == "call_module"]
        self._modules = [model.get_submodule(target) for target in targets]
        read: list[list[str]] = [[] for _ in self.layers]
        for node in self.graph.nodes:
            if node.op == "get_attr":
                for user in node.users:
                    read[self._index[user]].append(str(node.target))
        self.sharing = find_sharing(model, self._modules, read)
        self.uncut = uncut_of(self.sharing, len(self.layers))
        self._lookups = self._find_lookups(targets)
        # The input that keys are selected of must come as far as the layer that looks them up.
        self._keys_needed: dict[str, int] = {}
        for index, lookup in self._lookups:
            self._keys_needed[lookup.keys.input] = index

    def keep_whole(self, names: Collection[str]) -> None:
        """Have no cut where values that are no tensors would cross it."""
        spans = []
        for node in self.graph.nodes:
            last = max(self._uses(node), default=-1) if node.name in names else -1
            if node.op in _COMPUTED and REMADE not in node.meta and self._index[node] < last:
                spans.append(Sharing(self._index[node], last, node.name))
        self.sharing = (*self.sharing, *spans)
        self.uncut = uncut_of(self.sharing, len(self.layers))

    def stage(self, first: int, last: int) -> StageGraph:
        """The module of layers `first` to `last`, inclusive.

        Raises:
            ModelError: it would part layers that share something.
        """
        for shared in self.sharing:
            for cut in (first - 1, last):
                if shared.first <= cut < shared.last:
                    raise ModelError(
                        f"{self._where()}: {self.layers[shared.first].name!r} and "
                        f"{self.layers[shared.last].name!r} share {shared.what!r}; expected a plan "
                        f"without a cut after {self.layers[cut].name!r}"
                    )
        return self._part(first, last)

    def layer(self, index: int) -> StageGraph:
        """The module of one layer, to be measured; what it shares with others stays theirs, too.

        It may change in place what it is given.
        """
        return self._part(index, index, keeps_given=False)

    def _part(self, first: int, last: int, *, keeps_given: bool = True) -> StageGraph:
        final = last == len(self.layers) - 1
        inputs = self.crossing(first - 1)
        outputs = () if final else self.crossing(last)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        modules: dict[str, nn.Module | Tensor] = {}
        by_name = {node.name: node for node in self.graph.nodes}
        for name in inputs:
            copies[by_name[name]] = graph.placeholder(name)
        for index in range(first, last + 1):
            start = f"{OWN}._start_{index}"
            modules[start] = LayerStart(self.layers[index].name)
            graph.call_module(start)
            for node in self.graph.nodes:
                if node.op in _COMPUTED and self._index[node] == index:
                    self._remake(node, graph, copies)
                    for read in node.all_input_nodes:
                        if read.op == "get_attr" and read not in copies:
                            copies[read] = self._placed(graph.node_copy(read), modules)
                    if keeps_given:
                        self._keep_given(node, graph, copies)
                    copies[node] = graph.node_copy(node, lambda n: copies[n])
                    if node.op == "call_module":
                        self._placed(copies[node], modules)
        results = self._results() if final else {name: by_name[name] for name in outputs}
        graph.output(tuple(copies[node] for node in results.values()))
        traced = fx.GraphModule(modules, graph, self._where())
        inside = {id(one) for one in traced.modules()}
        others = {
            mode: [one for one in some if id(one) in inside] for mode, some in self._others.items()
        }
        module = StageModule(traced, others)
        module.training = self.model.training
        lookups = tuple(lookup for index, lookup in self._lookups if first <= index <= last)
        uncalled = {} if first else self._uncalled()
        named = final and isinstance(self._result(), Mapping)
        return StageGraph(module, inputs, tuple(results), lookups, uncalled, final, named)

    def layer_of(self, node: fx.Node) -> int:
        """The number of the layer that a value is computed with; -1: an input, or a weight."""
        return self._index.get(node, _BEFORE_ALL)

    def crossing(self, after: int) -> tuple[str, ...]:
        """Names of the values alive between layer `after` and the next; -1: the inputs used."""
        names = []
        for node in self.graph.nodes:
            made = _BEFORE_ALL if node.op == "placeholder" else self._index.get(node)
            if made is None or made > after or REMADE in node.meta:
                continue
            used = list(self._uses(node))
            if node.op == "placeholder":
                used.append(self._keys_needed.get(node.name, _BEFORE_ALL))
            if any(index > after for index in used):
                names.append(node.name)
        return tuple(names)

    def _keep_given(self, node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
        """Give an operation that may change it a copy of what came from the stage before.

        That is a leaf of the stage's own graph, where nothing may be changed in place.
        """
        if may_change(self.model, node):
            for value in node.all_input_nodes:
                if value.op in _COMPUTED and copies[value].op == "placeholder":
                    copies[value] = graph.call_function(copied, (copies[value],))

    def _remake(self, node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
        """Make in a stage's graph what a node takes and each stage makes of inputs by itself."""
        for read in node.all_input_nodes:
            if REMADE in read.meta and read not in copies:
                self._remake(read, graph, copies)
                copies[read] = graph.node_copy(read, lambda n: copies[n])

    def _uncalled(self) -> dict[str, Tensor]:
        """State of modules that forward does not call."""
        with state_besides():
            called = {id(t) for m in self._modules for t in m.state_dict(keep_vars=True).values()}
            state = self.model.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in state.items() if id(tensor) not in called}

    def _uses(self, node: fx.Node) -> Iterator[int]:
        """The layers that use a value, or what is made anew of it."""
        for user in node.users:
            if REMADE in user.meta:
                yield from self._uses(user)
            else:
                yield len(self.layers) - 1 if user.op == "output" else self._index[user]

    def _check_signature(self) -> None:
        inputs = self._inputs
        names = list(inspect.signature(self.model.forward).parameters)
        for name in names if names != [BATCH] else []:
            if name not in inputs:
                raise ModelError(
                    f"{self._where()}: forward takes {name!r}; expected only {', '.join(inputs)}, "
                    f"or one {BATCH!r} with all of them"
                )
        own = [name for name, _ in self.model.named_parameters(recurse=False)]
        own += [name for name, _ in self.model.named_buffers(recurse=False)]
        if own:
            raise ModelError(
                f"{self._where()}: {own[0]!r} belongs to the model itself and so to no layer; "
                f"move it into a child module{_OWN}"
            )

    def _trace(self, training: bool) -> fx.Graph:
        try:
            with in_mode(self.model, training):
                if isinstance(self.model, Followed):
                    return followed(self.model, self._inputs)
                draws = Draws.now()
                graph = unpacked(self.model, _CalledModules().trace(self.model))
                self._drawn.append(draws.since())
                if isinstance(vars(self.model).get("aux_loss"), fx.Proxy):
                    raise ModelError(f"{self._where()}: {_AUXILIARY}")
                return graph
        except ModelError:
            raise
        except Exception as error:
            file = inspect.getsourcefile(type(self.model)) or ""
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
            at = f"{file}:{frames[-1].lineno}: {frames[-1].line}" if frames else self._where()
            raise ModelError(
                f"the model cannot be traced at {at}: {type(error).__name__}: {error}; forward may "
                "call modules and tensor operations; Python control flow that depends "
                "on tensor values belongs inside a child module"
            ) from error

    def _check_inputs(self) -> None:
        inputs = self._inputs
        for node in self.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.target not in inputs:
                raise ModelError(
                    f"{self._where()}: forward reads {node.target!r} from its batch, which has "
                    f"{', '.join(inputs)}"
                )
            if node.name != node.target:
                raise ModelError(
                    f"{self._where()}: forward takes {node.target!r}, a name that Python or torch "
                    "has a use for; expected another one in data.columns"
                )

    def _check_modes(self) -> None:
        """Refuse a forward that is another one in evaluation: there is one trace for both."""
        other = self._trace(training=False)
        once, again = self._drawn or ((), ())
        if set(once) & set(again):  # in one of them another thread may have
            raise ModelError(f"{self._where()}: {_DRAWN}")
        here, there = list(self.graph.nodes), list(other.nodes)
        for node, twin in zip(here, there, strict=False):
            if _written(node) != _written(twin):
                break
        else:
            if len(here) == len(there):
                return
            node = (here if len(here) > len(there) else there)[min(len(here), len(there))]
        raise ModelError(
            f"{self._where()}: forward depends on self.training at {node.name!r}; what differs in "
            "evaluation belongs into a child module, such as\n"
            "    self.drop = nn.Dropout(0.1)     # in __init__\n"
            "    x = self.drop(x)                # in forward, in place of nn.functional.dropout"
        )

    def _assign(self) -> None:
        layers: list[LayerInfo] = []
        calls: Counter[str] = Counter()
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                continue
            if node.op == "call_module":
                name = str(node.target)
                calls[name] += 1
                shown = name if calls[name] == 1 else f"{name}#{calls[name]}"
                layers.append(LayerInfo(shown, kind_of(self.model.get_submodule(name))))
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
        for node in self.graph.nodes:
            if node.op == "get_attr":
                self._check_read(str(node.target), list(calls))
        # What is made of inputs alone is made where it is first needed.
        for node in reversed(self.graph.nodes):
            if self._index.get(node) == _BEFORE_ALL and REMADE not in node.meta:
                self._index[node] = min(self._uses(node), default=0)

    def _check_read(self, target: str, called: list[str]) -> None:
        """A parameter may be read beside the call of the module that it is in, to be tied."""
        if not any(target.startswith(f"{name}.") for name in called):
            raise ModelError(
                f"{self._where()}: forward reads {target!r} directly; "
                f"move it into a child module{_OWN}"
            )

    def _placed(self, node: fx.Node, modules: dict[str, nn.Module | Tensor]) -> fx.Node:
        """A copied node whose target is where the stage has it; that is noted in `modules`."""
        target = str(node.target)
        node.target = f"{OWN}.{target}"
        if node.op == "call_module":
            modules[node.target] = self.model.get_submodule(target)
        else:
            path, _, name = target.rpartition(".")
            modules[node.target] = getattr(self.model.get_submodule(path), name)
        return node

    def _find_lookups(self, targets: list[str]) -> list[tuple[int, Lookup]]:
        """The lookups with the layers that make them."""
        lookups = find_lookups(self.model, self.graph, training=True)
        if lookups != find_lookups(self.model, self.graph, training=False):
            raise ModelError(
                f"{self._where()}: which keys its SparseEmbeddings look up depends on "
                "self.training; expected the same in evaluation"
            )
        found = []
        made, each = Counter[str](), Counter(lookup.embedding for lookup in lookups)
        for lookup in lookups:
            inside = [
                index
                for index, target in enumerate(targets)
                if lookup.embedding == target or lookup.embedding.startswith(f"{target}.")
            ]
            # A module that is called again makes the same lookups again.
            call = made[lookup.embedding] * len(inside) // each[lookup.embedding]
            made[lookup.embedding] += 1
            found.append((inside[call], lookup))
        return found

    def _result(self) -> object:
        output = next(node for node in self.graph.nodes if node.op == "output")
        return output.args[0]

    def _results(self) -> dict[str, fx.Node]:
        """What forward returns, by name; the only one by that of its node."""
        result = self._result()
        if isinstance(result, fx.Node):
            return {result.name: result}
        several = dict(result) if isinstance(result, Mapping) else {}
        if not several or not all(
            isinstance(name, str) and isinstance(node, fx.Node) for name, node in several.items()
        ):
            raise ModelError(f"{self._where()}: forward returns something else; {RETURNED}")
        return several

    def _where(self) -> str:
        return type(self.model).__name__


def _written(node: fx.Node) -> tuple[object, ...]:
    target = getattr(node.target, "written", node.target)  # of a constant what it is
    return node.op, target, str(node.args), str(node.kwargs)


def kind_of(layer: nn.Module) -> str:
    """The kind of a layer, as the scheduler's features name it."""
    if any(isinstance(m, MoE) for m in layer.modules()):
        return "moe"  # first, as plans ask where experts are
    if any(isinstance(m, SparseEmbedding) for m in layer.modules()):
        return "embedding"
    if any(isinstance(m, nn.MultiheadAttention) for m in layer.modules()):
        return "attention"
    if any(isinstance(m, nn.modules.conv._ConvNd) for m in layer.modules()):
        return "convolution"
    if any(True for _ in layer.parameters()):
        return "dense"
    return "elementwise"
