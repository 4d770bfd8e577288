"""Layers that see a micro-batch whole, so that training depends on how a batch is cut into them.

Wherever there is one, the job fixes the number of micro-batches and the plan does not choose it.
"""

from collections.abc import Callable, Iterator
from types import CodeType, FunctionType

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from protos.job_pb2 import TrainSpec
from workers.model.code.entry import ModelError
from workers.model.module.modes import in_mode
from workers.moe.layer import MoE

SYNC = "sync"
_MOST = 4
_LEAST_SAMPLES = 64  # a micro-batch
_OURS = ("torch.", "workers.", "heterps.")
# Names in a forward that mean random numbers, statistics of the batch, or a loss of its own.
_TELLING = frozenset(
    (
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "rrelu"),
        *("feature_alpha_dropout", "gumbel_softmax", "rand", "randn", "randint", "rand_like"),
        *(
            "randn_like",
            "randint_like",
            "randperm",
            "bernoulli",
            "multinomial",
            "normal",
            "poisson",
        ),
        *("bernoulli_", "normal_", "uniform_", "exponential_", "random_", "geometric_", "cauchy_"),
        *("log_normal_", "native_dropout", "batch_norm", "aux_loss"),
    )
)


def whole_seeing(model: nn.Module) -> tuple[str, ...]:
    """Dotted names of the modules that see their micro-batch whole, the model's own being ''.

    These are batch normalisation, dropout and whatever else draws random numbers, mixtures of
    experts, embeddings that scale gradients by how often a key comes, and modules that add an
    `aux_loss`. Of a module's own forward the names that its code
    uses tell; what it does by other means is not seen.
    """
    return tuple(name for name, module in model.named_modules() if _sees_whole(module))


def fixed_micro_batches(batch_size: int) -> int:
    """How many micro-batches a step has where such a layer is and the job does not say."""
    return max(1, min(_MOST, batch_size // _LEAST_SAMPLES))


def job_micro_batches(train: TrainSpec, model: nn.Module, mixes: Callable[[], bool]) -> int:
    """Micro-batches of a step as far as the job fixes them; 0: the plan chooses.

    Args:
        mixes: tells whether a forward sees other samples of its micro-batch, which no class or
            name may say; asked where these say nothing.
    """
    if train.micro_batches:
        number: int = train.micro_batches
        return number
    if train.batch_norm == SYNC and has_batch_norm(model):
        return 1
    return fixed_micro_batches(train.batch_size) if whole_seeing(model) or mixes() else 0


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a layer normalises by the statistics of its micro-batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def check_smallest(model: nn.Module, samples: int) -> None:
    """Refuse micro-batches that are too small to be normalised, before the first one is.

    Args:
        samples: of the smallest micro-batch.

    Raises:
        ModelError: it is a single sample.
    """
    if samples > 1:
        return
    with in_mode(model, training=True):
        training = {module for module in model.modules() if module.training}
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm1d) and module in training:
            raise ModelError(
                f"{type(model).__name__}: {name!r} cannot normalise an epoch's last batch, of "
                "which a micro-batch is a single sample; expected train.drop_last: true, another "
                "train.batch_size, or fewer train.micro_batches"
            )


def _sees_whole(module: nn.Module) -> bool:
    if isinstance(module, _BatchNorm | MoE | nn.RReLU):
        return True
    if isinstance(module, _NormBase):
        return bool(module.track_running_stats)
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout > 0)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return bool(module.scale_grad_by_freq)
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return hasattr(module, "aux_loss") or any(_TELLING & names for names in _used_names(module))


def _used_names(module: nn.Module) -> Iterator[set[str]]:
    """Names in the code that a user's module runs in forward."""
    for kind in type(module).__mro__:
        if f"{kind.__module__}.".startswith(_OURS) or kind is object:
            continue
        for name, member in vars(kind).items():
            if isinstance(member, FunctionType) and "init" not in name and "reset" not in name:
                yield set(_names(member.__code__))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
