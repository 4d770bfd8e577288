"""A model tried on a few samples before it is trained: what no name in its code tells.

Whether its forward sees other samples of its micro-batch, and whether all that it computes with is
where training finds it. Layers run one after the other on the host, each with parameters of its own
for the time being: those of a new model may hide what it does, as a last layer of zeros would.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_map

from protos.job_pb2 import JobSpec
from workers.data.reader import Dataset
from workers.data.tensors import first_samples, tensors_of
from workers.device.mapped import empty_like
from workers.embedding.sparse import SparseEmbedding
from workers.learning.optimizers import GroupError, check_groups
from workers.model.chain.trace import TracedModel
from workers.model.code.entry import ModelError
from workers.model.module.modes import in_mode, keeping_buffers
from workers.model.module.places import parameter_places
from workers.model.module.randomness import Draws
from workers.model.module.whole import job_micro_batches
from workers.moe.gate import Gate

_PART = 8  # samples
_SEED = 1
_NOISE = 0.1  # of a parameter's mean size
_SMALLEST = 0.1  # size that noise is taken of
_TOLERANCE = 1e-4  # of the largest prediction: batches of other sizes round otherwise
_OWN = "    self.weight = nn.Parameter(…)    # or nn.ParameterList([…]), nn.ModuleList([…])"
_log = logging.getLogger("heterps.stage")


def micro_batches_of(job: JobSpec, traced: TracedModel) -> int:
    """Micro-batches of a step as far as the job fixes them; 0: the plan chooses.

    Raises:
        DataError: the first samples of the job do not fit it.
    """
    return job_micro_batches(job.train, traced.model, lambda: mixes_samples(traced, job))


def mixes_samples(traced: TracedModel, job: JobSpec) -> bool:
    """Whether a prediction depends on the other samples of its micro-batch, or on how many.

    Where the model cannot be tried it is taken to.

    Raises:
        DataError: the first samples of the job do not fit it.
    """
    parts = first_parts(job)
    if not parts:
        return False
    first, second, third = parts
    try:
        results = [run(traced, joined(first, part)) for part in (second, third)]
        results.append(run(traced, second))
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
        return True
    samples = len(next(iter(first.values())))
    together, other, alone = (
        list(each.values()) if isinstance(each, dict) else [each] for each in results
    )
    compared = zip(together, other, alone, strict=True)
    return any(_mixed(one, another, last, samples) for one, another, last in compared)


def _mixed(together: Any, other: Any, alone: Any, samples: int) -> bool:
    """Whether predictions of two parts together, of one with another, and alone are not alike."""
    results = together, other, alone
    if not all(isinstance(r, Tensor) and r.isfinite().all() for r in results):
        return True
    if not together.ndim:  # of no sample
        return not torch.equal(together, other) or not torch.equal(together, alone)
    if len(together) != 2 * samples or len(alone) != samples:
        return True
    # In a batch of the same size a sample's prediction is the same to the bit.
    if not torch.equal(together[:samples], other[:samples]):
        return True
    difference = (together[samples:] - alone).abs().max()
    return bool(difference > _TOLERANCE * together.abs().max())


def check_parameters(traced: TracedModel, job: JobSpec) -> None:
    """Refuse a model that computes with what training would not find.

    Raises:
        ModelError: the layer that does, and the remedy.
        DataError: the first samples of the job do not fit it.
    """
    _check_groups(traced, job)
    _check_hooks(traced, job)
    parts = first_parts(job)
    if not parts:
        return
    batch = joined(*parts[:2])
    _check_kept(traced, batch)
    # From a staleness of 1 on a step puts the parameters of its version in place.
    exchanged = job.train.staleness > 0 and not job.train.split_experts
    try:
        # What a forward makes anew is none of this: it is another one each time.
        reached, again = (_reached(traced, batch, exchanged) for _ in range(2))
    except ModelError:
        raise
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
        return
    names: dict[Tensor, str] = {p: name for name, p in traced.model.named_parameters()}
    for layer, tensors in reached.items():
        own = set(traced.model.get_submodule(layer).parameters())
        for tensor in tensors:
            if not any(tensor is found for found in again.get(layer, ())):
                continue
            where = f"{type(traced.model).__name__}: {layer!r} computes with"
            if tensor not in names:
                raise ModelError(
                    f"{where} a tensor {list(tensor.shape)} that is to learn and is no parameter "
                    "of the model, so that it is neither trained nor saved: it is kept in a "
                    "closure, a plain list or a global; expected a parameter of the module:"
                    f"\n{_OWN}"
                )
            if tensor not in own:
                raise ModelError(
                    f"{where} {names[tensor]!r}, which it does not have: a plan may put them into "
                    "different stages; expected the module that has it to be an attribute of "
                    "both, or the parameter to be passed through forward"
                )
            if exchanged:
                raise ModelError(
                    f"{where} {names[tensor]!r} by a reference that cannot be exchanged for the "
                    "one of another step: a closure has it, say; expected it to be read from the "
                    "module in forward, as self.weight, or train.staleness: 0"
                )


def _check_hooks(traced: TracedModel, job: JobSpec) -> None:
    """Refuse hooks on the gradients of parameters, which would see those of micro-batches.

    From a staleness of 1 on they would see none, as each version has parameters of its own.
    """
    if job.train.micro_batches == 1 and not job.train.staleness:
        return
    for name, parameter in traced.model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"{type(traced.model).__name__}: {name!r} has a hook on its gradient, which is "
                "that of a micro-batch and not of the step; expected train.clip, a group of "
                "train.optimizer.groups, a torch.autograd.Function in forward, or "
                "train.micro_batches: 1 with train.staleness: 0"
            )


def _check_kept(traced: TracedModel, batch: Mapping[str, Tensor]) -> None:
    """Refuse a forward that changes parameters: each worker and each version has others.

    And one that computes with what it has kept of another: each worker has had others.
    """
    layers = _Layers(traced, varied=True, twice=True)
    try:
        with tried(traced.model), torch.no_grad():
            layers.run(*given_to(traced, batch))
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
    names: dict[Tensor, str] = {p: name for name, p in traced.model.named_parameters()}
    for layer, parameter in layers.changed:
        changed = names.get(parameter, "a parameter")
        raise ModelError(
            f"{type(traced.model).__name__}: {layer!r} changes {changed!r} in its forward, as "
            "nn.Embedding does with max_norm, and each worker has a copy of its own; expected "
            "parameters that the optimizer alone changes: what is read of them can be scaled in "
            "forward"
        )
    for layer in layers.remembering:
        raise ModelError(
            f"{type(traced.model).__name__}: {layer!r} computes with what it has kept or counted "
            "in an earlier forward: each worker has had other ones, and no checkpoint and no saved "
            "model has it; expected a forward that follows from parameters, buffers and what it is "
            "given, or a buffer for what is kept, where a stage has one worker:"
            "\n    self.register_buffer('seen', torch.zeros(()))"
        )


def structures_of(traced: TracedModel, job: JobSpec) -> set[str]:
    """Names of the values between layers that are no tensors, such as the state of an LSTM.

    Raises:
        DataError: the first samples of the job do not fit it.
    """
    parts = first_parts(job)
    if not parts:
        return set()
    layers = _Layers(traced, varied=False)
    try:
        with tried(traced.model), torch.no_grad():
            layers.run(*given_to(traced, parts[0]))
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
    return layers.structures


def _check_groups(traced: TracedModel, job: JobSpec) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in traced.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    try:
        check_groups(job.train.optimizer, [*names.values()])
    except GroupError as error:
        raise ModelError(str(error)) from None


def first_parts(job: JobSpec) -> Sequence[Mapping[str, Tensor]]:
    """Three batches of as many samples, different ones as far as there are; none without data."""
    dataset = Dataset.of(job, "train")
    found = first_samples(dataset, 3 * _PART)
    if not len(found):
        return ()
    size = max(1, min(_PART, len(found) // 3))
    rows = [np.arange(part * size, (part + 1) * size) % len(found) for part in range(3)]
    return [tensors_of(found.take(some)) for some in rows]


def joined(*parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All samples of some batches."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def run(traced: TracedModel, batch: Mapping[str, Tensor]) -> Any:
    """What a model gives for a batch, with other parameters than its own; leaves no mark on it."""
    with tried(traced.model), torch.no_grad():
        return _Layers(traced, varied=True).run(*given_to(traced, batch))


def _reached(
    traced: TracedModel, batch: Mapping[str, Tensor], exchanged: bool
) -> dict[str, list[Tensor]]:
    """What each layer computes with that would learn, but for what was exchanged and for rows."""
    with tried(traced.model) as rows, torch.enable_grad():
        layers = _Layers(traced, varied=exchanged)
        layers.run(*given_to(traced, batch))
    return {
        layer: [leaf for leaf in leaves if leaf.data_ptr() not in rows.given]
        for layer, leaves in layers.reached.items()
    }


def given_to(traced: TracedModel, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """What a model's graph takes of a batch, in order."""
    return [batch[str(n.target)] for n in traced.graph.nodes if n.op == "placeholder"]


class _Layers(fx.Interpreter):
    """Runs a model layer by layer.

    Args:
        varied: whether layers have other parameters than their own.
        twice: whether each is run twice on the same.

    Attributes:
        reached: by layer, the leaves of its graph that no exchanged parameter is.
        structures: names of values that are no tensors.
        changed: layers and the parameters, of those exchanged, that their forward changed.
        remembering: layers that gave something else the second time.
    """

    def __init__(self, traced: TracedModel, *, varied: bool, twice: bool = False) -> None:
        super().__init__(traced.model, graph=traced.graph)
        self.reached: dict[str, list[Tensor]] = {}
        self.structures: set[str] = set()
        self.changed: list[tuple[str, Tensor]] = []
        self.remembering: list[str] = []
        self._varied = varied
        self._twice = twice
        self._generator = torch.Generator().manual_seed(_SEED)

    def run_node(self, n: fx.Node) -> Any:
        """Compute a value, and note whether it is a tensor."""
        result = super().run_node(n)
        if not isinstance(result, Tensor):
            self.structures.add(n.name)
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer on its own."""
        module = self.fetch_attr(target)
        with ExitStack() as stack:
            others: dict[Tensor, Tensor] = {}
            if self._varied:
                others = stack.enter_context(varied(module, self._generator))
            marks = {other: _mark(other) for other in others}
            if self._twice:
                with _as_before(module):
                    first = super().call_module(target, _copied(args), _copied(kwargs))
            result = super().call_module(target, _detached(args), _detached(kwargs))
            changed = [other for other, mark in marks.items() if _mark(other) != mark]
            self.changed += [(str(target), others[other]) for other in changed]
            if self._twice and not changed and not _same(first, result):
                self.remembering.append(str(target))
            if torch.is_grad_enabled():
                own = set() if self._varied else set(module.parameters())
                leaves = [leaf for leaf in _leaves(result) if leaf not in own | others.keys()]
                self.reached.setdefault(str(target), []).extend(leaves)
        return _detached(result)


@contextmanager
def varied(module: nn.Module, generator: torch.Generator) -> Iterator[dict[Tensor, Tensor]]:
    """Have other parameters in a module in place of those that are trained; these, of each."""
    places = parameter_places(module, besides=True)
    others = {parameter: _varied_from(parameter, generator) for parameter in places}
    try:
        for parameter, where in places.items():
            for place in where:
                place.put(others[parameter])
        yield {other: parameter for parameter, other in others.items()}
    finally:
        for parameter, where in places.items():
            for place in where:
                place.put(parameter)


def _varied_from(parameter: Tensor, generator: torch.Generator) -> nn.Parameter:
    values = parameter.detach()
    mean = float(torch.linalg.vector_norm(values, 1)) / max(1, values.numel())
    other = empty_like(values)  # experts out of memory have others there, too
    other.uniform_(-1.0, 1.0, generator=generator).mul_(_NOISE * max(mean, _SMALLEST))
    return nn.Parameter(other.add_(values))


class _Rows:
    """Rows of any key, for embeddings that nothing is bound to.

    Attributes:
        given: where those that were asked for lie in memory.
    """

    def __init__(self) -> None:
        self.given: set[int] = set()
        self._kept: list[NDArray[np.float32]] = []

    def of(self, dim: int) -> "_RowsOfTable":
        return _RowsOfTable(self, dim)

    def keep(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        self.given.add(rows.ctypes.data)
        self._kept.append(rows)  # so that nothing else comes to lie there
        return rows


class _RowsOfTable:
    def __init__(self, rows: _Rows, dim: int) -> None:
        self._rows, self._dim = rows, dim

    def pull(self, keys: NDArray[np.uint64], read_only: bool) -> NDArray[np.float32]:
        angles = np.outer(1 + keys % np.uint64(99991), 1 + np.arange(self._dim))
        return self._rows.keep(np.sin(angles).astype(np.float32))

    def push(self, keys: NDArray[np.uint64], grads: NDArray[np.float32]) -> None:
        pass


@contextmanager
def tried(model: nn.Module) -> Iterator[_Rows]:
    """Have a model as in training, and all as it was afterwards, generators too."""
    rows = _Rows()
    with in_mode(model, training=True), torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(_SEED)
        for module in model.modules():
            if isinstance(module, SparseEmbedding):
                module.store = rows.of(module.spec.dim)
                module.remote = False
                module._bound = None
        yield rows


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Afterwards what draws, normalises or gates is as it was, and all else that a module keeps.

    Attributes of its own are not.
    """
    draws = Draws.now()
    gates = [(one, one.draws) for one in module.modules() if isinstance(one, Gate)]
    with keeping_buffers(module):
        try:
            yield
        finally:
            draws.again()
            for gate, drawn in gates:
                gate.draws = drawn


def _mark(parameter: Tensor) -> tuple[int, float]:
    """Differs where a parameter was changed; what is changed by its `data` counts no version."""
    return parameter._version, float(parameter.detach().sum(dtype=torch.float64))


def _same(one: Any, other: Any) -> bool:
    """Whether two results have the same tensors, as nearly as sums in another order."""
    some, others = (
        [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
        for result in (one, other)
    )
    if [value.shape for value in some] != [value.shape for value in others]:
        return False
    return all(
        torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
        for a, b in zip(some, others, strict=True)
    )


def _copied(values: Any) -> Any:
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, values)


def _detached(values: Any) -> Any:
    return tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, values)


def _leaves(result: Any) -> list[Tensor]:
    """The tensors that autograd would give gradients for."""
    values = [v for v in tree_flatten(result)[0] if isinstance(v, Tensor)]
    found = {id(v): v for v in values if v.requires_grad and v.grad_fn is None}
    waiting: list[Any] = [v.grad_fn for v in values]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        waiting.extend(following for following, _ in node.next_functions)
    return list(found.values())
