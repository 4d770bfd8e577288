"""Training as one process of plain PyTorch does it: what all plans are held against.

Nothing of ours but the model's own module is used: `torch.optim` for dense weights, and for rows
too, each a parameter of its own, so that it counts its own steps and one that a batch does not
touch is left alone. Gradients are those of whole batches, on the weights that a staleness of S
says.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import nn

_DENSE = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


class RowwiseAdagrad(torch.optim.Optimizer):
    """One accumulator a row: the mean of its squared gradients."""

    def __init__(self, params, lr, weight_decay, eps=1e-10, initial_accumulator_value=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._eps, self._first = eps, initial_accumulator_value

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for row in group["params"]:
                if row.grad is None:
                    continue
                d = row.grad + group["weight_decay"] * row
                state = self.state[row]
                state["sum"] = state.get("sum", self._first) + d.square().mean()
                row.sub_(group["lr"] * d / (state["sum"].sqrt() + self._eps))


def row_optimizer(rows, name, lr, weight_decay, settings):
    options = {"lr": lr, "weight_decay": weight_decay, **settings}
    if "initial_accumulator" in options:
        options["initial_accumulator_value"] = options.pop("initial_accumulator")
    if name == "momentum":
        return torch.optim.SGD(rows, **{"momentum": 0.9, **options})
    if name == "rowwise_adagrad":
        return RowwiseAdagrad(rows, **options)
    if name == "adagrad":
        return torch.optim.Adagrad(rows, **{"initial_accumulator_value": 0.1, **options})
    return _DENSE[name](rows, **options)


def dense_optimizer(parameters, spec):
    options = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
    if spec.momentum:
        options["momentum"] = spec.momentum
    if spec.betas:
        options["betas"] = tuple(spec.betas)
    if spec.eps:
        options["eps"] = spec.eps
    return _DENSE[spec.name](parameters, **options)


def rate(spec, step, steps):
    """The factor of a learning rate: a linear warm-up, then a cosine down to a tenth."""
    if step < spec.warmup_steps:
        return (step + 1) / (spec.warmup_steps + 1)
    if spec.schedule != "cosine":
        return 1.0
    part = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * part))


class Given(nn.Module):
    """Stands for an embedding: its rows are given, all of them [keys, dim]."""

    rows: torch.Tensor

    def forward(self, keys):
        return self.rows[keys]


@dataclass
class Table:
    """A table of few keys.

    Args:
        first: its first rows, [keys, dim].
    """

    first: torch.Tensor
    optimizer: str
    learning_rate: float
    weight_decay: float
    settings: dict = field(default_factory=dict)
    rows: list[nn.Parameter] = field(init=False)
    learns: torch.optim.Optimizer = field(init=False)

    def __post_init__(self):
        self.rows = [nn.Parameter(row.clone()) for row in self.first]
        self.learns = row_optimizer(
            self.rows, self.optimizer, self.learning_rate, self.weight_decay, self.settings
        )

    def values(self):
        return torch.stack([row.detach().clone() for row in self.rows])


@dataclass
class Trained:
    """What came of a training."""

    model: nn.Module
    tables: dict[str, Table]
    losses: list[float]
    diverged_at: int | None = None


def train(model, tables, forward, job, batches, after=lambda step, dense, rows: False):
    """Train a model.

    Args:
        model: whose embeddings are `Given`, under the names in `tables`.
        tables: by the name of the model's child that looks up there.
        forward: (model, batch) -> loss, auxiliary loss or None, and the keys touched.
        batches: whole ones, one a step.
        after: called after each step with how many were taken, weights and rows; whether to end.
    """
    spec, row_spec, clip = job.train.optimizer, job.train.rows, job.train.clip
    parameters = dict(model.named_parameters())
    optimizer = dense_optimizer(list(parameters.values()), spec)

    def now():
        dense = {name: p.detach().clone() for name, p in parameters.items()}
        return dense, {name: table.values() for name, table in tables.items()}

    history, losses = [now()], []
    for step, batch in enumerate(batches):
        dense, rows = history[max(0, step - job.train.staleness)]
        dense = {name: value.clone().requires_grad_() for name, value in dense.items()}
        for name in tables:
            model.get_submodule(name).rows = rows[name].clone().requires_grad_()
        with _swapped(model, dense):
            loss, auxiliary, keys = forward(model, batch)
            (loss if auxiliary is None else loss + auxiliary).backward()
        losses.append(loss.item())
        for name, parameter in parameters.items():
            parameter.grad = dense[name].grad
        for name, table in tables.items():
            gradient = model.get_submodule(name).rows.grad
            for key, row in enumerate(table.rows):
                row.grad = gradient[key].clone() if key in keys else None
        everything = [*parameters.values(), *(row for t in tables.values() for row in t.rows)]
        gradients = [p.grad for p in everything if p.grad is not None]
        if not all(g.isfinite().all() for g in gradients) or not loss.isfinite():
            return Trained(model, tables, losses, step)
        if clip:
            torch.nn.utils.clip_grad_norm_(everything, clip)
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * rate(spec, step, len(batches))
        optimizer.step()
        optimizer.zero_grad()
        for table in tables.values():
            for group in table.learns.param_groups:
                group["lr"] = table.learning_rate * rate(row_spec, step, len(batches))
            table.learns.step()
        history.append(now())
        if after(step + 1, *history[-1]):
            break
    return Trained(model, tables, losses)


class _swapped:
    """A model with other values for its parameters, for as long as it takes."""

    def __init__(self, model, values):
        self._model, self._values = model, values

    def __enter__(self):
        self._own = dict(self._model.named_parameters())
        self._set(self._values)

    def __exit__(self, *_):
        self._set(self._own)

    def _set(self, values):
        for path, value in values.items():
            parent, _, name = path.rpartition(".")
            module = self._model.get_submodule(parent)
            del module._parameters[name]
            if isinstance(value, nn.Parameter):
                module.__dict__.pop(name, None)
                module.register_parameter(name, value)
            else:
                module._parameters[name] = value
