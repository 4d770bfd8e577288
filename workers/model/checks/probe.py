"""A model tried on a few samples before it is trained: what no name in its code tells.

Whether its forward sees other samples of its micro-batch, and whether all that it computes with is
where training finds it.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from protos.job_pb2 import JobSpec
from workers.learning.optimizers import GroupError, check_groups
from workers.model.chain.trace import TracedModel
from workers.model.checks.kept import check_kept, check_unsaved
from workers.model.checks.others import heeds_others
from workers.model.checks.outliers import heeds_outliers
from workers.model.checks.trial import Layers, first_parts, given_to, joined, leaves, mark, run
from workers.model.code.entry import ModelError
from workers.model.module.buffers import other_buffers
from workers.model.module.tried import tried
from workers.model.module.whole import job_micro_batches

_FEW = 2  # samples that are computed back through, of each part
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

    So does one that a forward changes a buffer for: it does so once for each micro-batch. Where the
    model cannot be tried it is taken to.

    Raises:
        DataError: the first samples of the job do not fit it.
    """
    parts = first_parts(job)
    if not parts:
        return False
    first, second, third = parts
    try:
        if _changed_buffers(traced, joined(first, second)):
            return True
        results = [run(traced, joined(first, part)) for part in (second, third)]
        results.append(run(traced, second))
        samples = len(next(iter(first.values())))
        if heeds_outliers(traced, joined(first, second), samples):
            return True
        if heeds_others(traced, first, second, results[0]):
            return True
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
        return True
    together, other, alone = (
        list(each.values()) if isinstance(each, dict) else [each] for each in results
    )
    compared = zip(together, other, alone, strict=True)
    if any(_mixed(one, another, last, samples) for one, another, last in compared):
        return True
    return _mixes_backward(traced, *({name: t[:_FEW] for name, t in one.items()} for one in parts))


def _mixes_backward(
    traced: TracedModel,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    third: Mapping[str, Tensor],
) -> bool:
    """Whether gradients of a sample depend on others, by a hook or an own backward."""
    samples, found = len(next(iter(first.values()))), []
    try:
        for part in (second, third):
            batch = joined(first, part)
            with tried(traced.model), torch.enable_grad():
                layers = _Felt(traced)
                found.append(layers.felt(given_to(traced, batch)))
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
        return True
    if len(found[0]) != len(found[1]):
        return True
    pairs = zip(*found, strict=True)
    return any(_felt_otherwise(one, other, samples) for one, other in pairs)


def _felt_otherwise(one: Tensor | None, other: Tensor | None, samples: int) -> bool:
    """Whether gradients of the first samples differ, of tensors that have rows of all samples."""
    if one is None or other is None or one.shape != other.shape:
        return False
    if not one.ndim or len(one) != 2 * samples or not one.numel():
        return False
    here, there = one[:samples], other[:samples]
    return not float((here - there).abs().max()) <= _TOLERANCE * float(here.abs().max())


def alone_in(traced: TracedModel, job: JobSpec) -> frozenset[str]:
    """Names of the layers that one worker computes alone: a forward changes a buffer of theirs.

    Several workers would each have another one. None where the model cannot be tried: then workers
    find out.

    Raises:
        DataError: the first samples of the job do not fit it.
    """
    parts = first_parts(job)
    if not parts:
        return frozenset()
    try:
        changed = _changed_buffers(traced, joined(*parts[:2]))
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
        return frozenset()
    names = [info.name for info in traced.layers]
    owners = {name: f"{name.partition('#')[0]}." for name in names}
    return frozenset(name for name in names if any(p.startswith(owners[name]) for p in changed))


def _changed_buffers(traced: TracedModel, batch: Mapping[str, Tensor]) -> list[str]:
    """Paths of the buffers that a forward changes, but for running statistics."""
    places = other_buffers(traced.model)
    if not places:
        return []
    with tried(traced.model), torch.no_grad():
        before = {path: getattr(child, name) for path, (child, name) in places.items()}
        marks = {path: mark(buffer) for path, buffer in before.items()}
        Layers(traced, varied=True).run(*given_to(traced, batch))
        return [
            path
            for path, (child, name) in places.items()
            if getattr(child, name) is not before[path] or mark(before[path]) != marks[path]
        ]


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
    first, second, *_ = parts
    batch = joined(first, second)
    enough = len(next(iter(first.values()))) > 1  # to be normalised
    some = (first, second) if enough else (batch, batch)
    check_kept(traced, *some)
    check_unsaved(traced, *some)
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


def structures_of(traced: TracedModel, job: JobSpec) -> set[str]:
    """Names of the values between layers that are no tensors, such as the state of an LSTM.

    Raises:
        DataError: the first samples of the job do not fit it.
    """
    parts = first_parts(job)
    if not parts:
        return set()
    layers = _Structures(traced)
    try:
        with tried(traced.model), torch.no_grad():
            layers.run(*given_to(traced, parts[0]))
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
    return layers.found


def _check_groups(traced: TracedModel, job: JobSpec) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in traced.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    try:
        check_groups(job.train.optimizer, [*names.values()])
    except GroupError as error:
        raise ModelError(str(error)) from None


def _reached(
    traced: TracedModel, batch: Mapping[str, Tensor], exchanged: bool
) -> dict[str, list[Tensor]]:
    """What each layer computes with that would learn, but for what was exchanged and for rows."""
    with tried(traced.model) as rows, torch.enable_grad():
        layers = _Reached(traced, varied=exchanged)
        layers.run(*given_to(traced, batch))
    return {
        layer: [leaf for leaf in leaves if leaf.data_ptr() not in rows.given]
        for layer, leaves in layers.reached.items()
    }


class _Reached(Layers):
    """Notes what layers compute with.

    Attributes:
        reached: by layer, the leaves of its graph that no exchanged parameter is.
    """

    def __init__(self, traced: TracedModel, *, varied: bool) -> None:
        super().__init__(traced, varied=varied)
        self.reached: dict[str, list[Tensor]] = {}

    def call_layer(
        self,
        layer: str,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        others: Mapping[Tensor, Tensor],
    ) -> Any:
        """What a layer gives."""
        result = super().call_layer(layer, module, args, kwargs, others)
        own = set() if self.varied else set(module.parameters())
        found = [leaf for leaf in leaves(result) if leaf not in own | others.keys()]
        self.reached.setdefault(layer, []).extend(found)
        return result


class _Felt(Layers):
    """Computes gradients of what layers give, and of inputs."""

    def __init__(self, traced: TracedModel) -> None:
        super().__init__(traced, varied=True)
        self._kept: list[Tensor] = []

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer; what it gives is a part of the whole graph."""
        with self.next_others(module := self.fetch_attr(target)):
            result = module(*args, **kwargs)
        return tree_map(self._kept_of, result)

    def felt(self, given: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of inputs and of what layers give, in the order in which they are made."""
        result = self.run(*(self._kept_of(one) for one in given))
        ends = [end for end in tree_leaves(result) if isinstance(end, Tensor) and end.requires_grad]
        if not ends:
            return []
        torch.autograd.backward([end.abs().square().sum() for end in ends])
        return [one.grad for one in self._kept]

    def _kept_of(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        kept = value if value.requires_grad else value.detach().requires_grad_()
        kept.retain_grad()
        self._kept.append(kept)
        return kept.clone()  # which may be changed in place


class _Structures(Layers):
    """Notes the names of values that are no tensors, or such as cross no cut."""

    def __init__(self, traced: TracedModel) -> None:
        super().__init__(traced, varied=False)
        self.found: set[str] = set()

    def run_node(self, n: fx.Node) -> Any:
        """Compute a value."""
        result = super().run_node(n)
        if not (isinstance(result, Tensor) and _crosses(result)):
            self.found.add(n.name)
        return result


def _crosses(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
