"""What layers keep over forwards, and what they change that others have: refused before training.

Each worker has had other forwards, other stages have had none of them, and no checkpoint has what
was kept. A tensor that is changed in place where it is used elsewhere, too, is another one there
only as long as both are in one stage.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from workers.model.chain.in_place import told_in_place
from workers.model.chain.sizes import REMADE
from workers.model.chain.trace import TracedModel
from workers.model.checks.numbers import Number, Numbers, far
from workers.model.checks.trial import Layers, given_to, mark
from workers.model.code.entry import ModelError
from workers.model.module.modes import keeping_buffers
from workers.model.module.randomness import Draws
from workers.model.module.tried import tried
from workers.moe.gate import Gate

_TOLERANCE = 1e-5  # of the largest value: the same computed again rounds alike, or nearly
_LEAST = 1e-7
_FAR = 1000.0  # parameters
_SEED = 3
_log = logging.getLogger("heterps.stage")


def check_kept(
    traced: TracedModel, batch: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> None:
    """Refuse layers that compute with what they, or others, have kept of earlier forwards.

    And those that change parameters, or tensors that are used elsewhere.

    Args:
        batch, other: some samples, and others.

    Raises:
        ModelError: the layer that does, and the remedy.
    """
    layers = _Kept(traced)
    try:
        with tried(traced.model), torch.no_grad():
            layers.run(*given_to(traced, batch))
            if not (layers.changed or layers.remembering or layers.overwritten):
                Layers(traced, varied=True).run(*given_to(traced, other))
                layers.run_back()
    except ModelError:
        raise
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
    where = type(traced.model).__name__
    names: dict[Tensor, str] = {p: name for name, p in traced.model.named_parameters()}
    for layer, parameter in layers.changed:
        changed = names.get(parameter, "a parameter")
        raise ModelError(
            f"{where}: {layer!r} changes {changed!r} in its forward, as "
            "nn.Embedding does with max_norm, and each worker has a copy of its own; expected "
            "parameters that the optimizer alone changes: what is read of them can be scaled in "
            "forward, and an average of others can be a buffer, where a stage has one worker"
        )
    for node, value in layers.overwritten:
        raise ModelError(told_in_place(traced.model, node, value))
    for layer in layers.remembering:
        raise ModelError(
            f"{where}: {layer!r} computes with what it has kept or counted "
            "in an earlier forward: each worker has had other ones, and no checkpoint and no saved "
            "model has it; expected a forward that follows from parameters, buffers and what it is "
            "given, or a buffer for what is kept, where a stage has one worker:"
            "\n    self.register_buffer('seen', torch.zeros(()))"
        )
    for layer in layers.overhearing:
        raise ModelError(
            f"{where}: {layer!r} computes with what another layer has kept of its forward, by an "
            "attribute or an object that both have: a plan may put them into different stages, "
            "where it is not there; expected the tensor to be returned by the one, and passed to "
            f"the other:\n    x, mask = self.one(x)\n    x = self.{layer}(x, mask)"
        )


def check_unsaved(
    traced: TracedModel, batch: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> None:
    """Refuse buffers that training changes and predictions depend on, and that are not saved.

    Args:
        batch, other: some samples, and others.

    Raises:
        ModelError: the buffer, and the remedy.
    """
    model = traced.model
    unsaved = {
        f"{path}.{name}".lstrip("."): (module, name, _copied(module._buffers[name]))
        for path, module in model.named_modules()
        for name in sorted(module._non_persistent_buffers_set)
    }
    if not unsaved:
        return

    def run(samples: Mapping[str, Tensor]) -> Any:
        return Layers(traced, varied=True).run(*_copied(given_to(traced, samples)))

    def predicted() -> Any:
        with _as_before(model):
            return run(other)

    needed = []
    try:
        with tried(model), torch.no_grad():
            run(batch)
            changed = {
                path: place
                for path, place in unsaved.items()
                if not _is_equal(place[0]._buffers[place[1]], place[2])
            }
            model.eval()
            trained = predicted() if changed else None
            for path, (module, name, as_built) in changed.items():
                with keeping_buffers(model):
                    module._buffers[name] = as_built
                    if not _same(trained, predicted()):
                        needed.append(path)
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
    if needed:
        raise ModelError(
            f"{type(model).__name__}: training changes the buffer {needed[0]!r}, predictions "
            "depend on it, and no saved model would have it; expected "
            "register_buffer(…, persistent=True)"
        )


@dataclass(slots=True)
class _Call:
    """A call of a layer, and what it gave; to be made again."""

    layer: str
    module: nn.Module
    args: Any
    kwargs: Any
    buffers: Sequence[tuple[nn.Module, str, Tensor]]
    draws: Draws
    gates: Sequence[tuple[Gate, int]]
    gave: Any = None

    @staticmethod
    def of(layer: str, module: nn.Module, args: Any, kwargs: Any) -> "_Call":
        buffers = [
            (one, name, buffer.clone())
            for one in module.modules()
            for name, buffer in one.named_buffers(recurse=False)
        ]
        gates = [(one, one.draws) for one in module.modules() if isinstance(one, Gate)]
        return _Call(layer, module, _copied(args), _copied(kwargs), buffers, Draws.now(), gates)

    def made(self) -> Any:
        """What the layer gives, from what it draws to what buffers are as at first."""
        self.draws.again()
        for gate, drawn in self.gates:
            gate.draws = drawn
        for module, name, value in self.buffers:
            module._buffers[name] = value.clone()
        with _as_before(self.module):
            result = self.module(*_copied(self.args), **_copied(self.kwargs))
            return result, _auxiliary(self.module)


class _Kept(Layers):
    """Runs each layer several times on the same.

    Attributes:
        changed: layers and parameters that their forward changed.
        remembering: layers that gave something else the second time, or after many calls.
        overwritten: nodes, and values that these changed though others use them.
        overhearing: layers that gave something else after others had run on other samples.
    """

    def __init__(self, traced: TracedModel) -> None:
        super().__init__(traced, varied=True)
        self._traced = traced
        self.changed: list[tuple[str, Tensor]] = []
        self.remembering: list[str] = []
        self.overwritten: list[tuple[fx.Node, fx.Node]] = []
        self.overhearing: list[str] = []
        self._made: list[_Call] = []
        self._order = {node: number for number, node in enumerate(traced.graph.nodes)}

    def run_node(self, n: fx.Node) -> Any:
        """Compute a value, and note which others have changed meanwhile."""
        before = {
            node: mark(value)
            for node, value in self.env.items()
            if isinstance(value, Tensor) and self._is_felt(node, n)
        }
        result: Any = super().run_node(n)
        changed = [node for node, was in before.items() if mark(self.env[node]) != was]
        self.overwritten += [(n, node) for node in changed]
        return result

    def call_layer(
        self,
        layer: str,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        others: Mapping[Tensor, Tensor],
    ) -> Any:
        """What a layer gives the second time."""
        own: dict[Tensor, Tensor] = {
            one: one for one in module.parameters() if not one.requires_grad
        }
        own.update(others)
        marks = {one: mark(one) for one in own}
        call = _Call.of(layer, module, args, kwargs)
        numbers = Numbers(module)
        call.gave = first = call.made()
        late = _after_many(call, counts) if (counts := numbers.changed()) else first
        result = module(*args, **kwargs)
        _check_auxiliary(type(self._traced.model).__name__, layer, module)
        again = result, _auxiliary(module)
        changed = _changed(marks)
        self.changed += [(layer, own[one]) for one in changed or _changed_far_off(call, others)]
        if not changed and not (_same(first, again) and _same(first, late)):
            self.remembering.append(layer)
        self._made.append(call)
        return result

    def run_back(self) -> None:
        """Run each layer again on what it was given, the last one first."""
        for number, call in reversed([*enumerate(self._made)]):
            with self.others(number, call.module):
                if not _same(call.gave, call.made()):
                    self.overhearing.append(call.layer)

    def _is_felt(self, value: fx.Node, node: fx.Node) -> bool:
        """Whether others would have another value than in the model's own forward if it changed.

        Values are computed layer by layer, and what is not handed to a layer that changes it is
        its own in another stage.
        """
        traced, order = self._traced, self._order
        made, changed = traced.layer_of(value), traced.layer_of(node)
        handed = value.op != "placeholder" and value in node.all_input_nodes
        for user in value.users:
            if user is node or REMADE in user.meta or (user.op == "output" and handed):
                continue
            used = len(traced.layers) if user.op == "output" else traced.layer_of(user)
            later = order[user] > order[node]
            if later != ((used, order[user]) > (changed, order[node])):
                return True
            if later and not handed and changed > made:
                return True
        return False


def _changed(marks: Mapping[Tensor, object]) -> list[Tensor]:
    return [one for one, was in marks.items() if mark(one) != was]


def _changed_far_off(call: _Call, parameters: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """Of its parameters those that a call changes where they are far off, as by a clamp.

    They stay so.
    """
    generator = torch.Generator().manual_seed(_SEED)
    for one in parameters:
        one.uniform_(-_FAR, _FAR, generator=generator)
    marks = {one: mark(one) for one in parameters}
    with suppress(Exception):  # such numbers may be none that it takes
        call.made()
    return _changed(marks)


def _after_many(call: _Call, counts: Sequence[Number]) -> Any:
    """What a call gives where what has counted calls has counted many."""
    try:
        return far(counts, call.made)
    except Exception:
        return call.gave  # such as an index; nothing is known then


def _auxiliary(module: nn.Module) -> list[Tensor]:
    found = [getattr(one, "aux_loss", None) for one in module.modules()]
    return [one.detach() for one in found if isinstance(one, Tensor)]


def _check_auxiliary(where: str, layer: str, module: nn.Module) -> None:
    """Refuse an `aux_loss` that is no number: nothing goes back from it, or its sum does."""
    for one in _auxiliary(module):
        if one.numel() != 1:
            raise ModelError(
                f"{where}: {layer!r} has an aux_loss {list(one.shape)}; expected a number [], such "
                "as its mean: self.aux_loss = loss.mean()"
            )


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


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _same(one: Any, other: Any) -> bool:
    """Whether two results have the same tensors, but for rounding."""
    some, others = (
        [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        for result in (one, other)
    )
    if [value.shape for value in some] != [value.shape for value in others]:
        return False
    return all(_alike(a, b) for a, b in zip(some, others, strict=True))


def _alike(one: Tensor, other: Tensor) -> bool:
    if not one.numel() or not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    one, other = (value.detach().to(torch.complex128) for value in (one, other))
    largest = float(one.abs().nan_to_num(posinf=0.0).max())
    return torch.allclose(
        one, other, rtol=0, atol=max(_LEAST, _TOLERANCE * largest), equal_nan=True
    )


def _copied(values: Any) -> Any:
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, values)
