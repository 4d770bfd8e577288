"""Dense layers, their Adam and the rows' Adagrad as TensorFlow has them."""

from collections.abc import Callable, Sequence
from typing import Any

from bench.ctr.shape import (
    ACCUMULATOR,
    DENSE_RATE,
    DIM,
    EPSILON,
    LEARNING_RATE,
    SLOTS,
    first_layers,
)

_ADAM_EPSILON = 1e-8


def first_weights(tf: Any) -> list[Any]:
    """Variables of the dense layers: weights [inputs, outputs] and biases in turns."""
    return [tf.Variable(one) for weight, bias in first_layers() for one in (weight.T.copy(), bias)]


def adam(tf: Any) -> Any:
    """Of the dense layers: as Keras has it, but epsilon is added once the bias is corrected."""

    class Corrected(tf.keras.optimizers.legacy.Adam):  # type: ignore[misc]
        def _prepare_local(self, device: Any, dtype: Any, state: Any) -> None:
            super()._prepare_local(device, dtype, state)
            own = state[(device, dtype)]
            own["epsilon"] = _ADAM_EPSILON * tf.sqrt(1 - own["beta_2_power"])

    return Corrected(DENSE_RATE)


def adagrad(tf: Any) -> Any:
    """Of the rows: gradients name each row once, which it need not look for."""

    class Distinct(tf.keras.optimizers.legacy.Adagrad):  # type: ignore[misc]
        def _resource_apply_sparse_duplicate_indices(
            self, grad: Any, handle: Any, indices: Any, **more: Any
        ) -> Any:
            return self._resource_apply_sparse(grad, handle, indices, **more)

    return Distinct(LEARNING_RATE, ACCUMULATOR, EPSILON)


def backward(tf: Any) -> Callable[..., tuple[Any, Any, list[Any]]]:
    """What gives loss, gradients of distinct rows, and of weights.

    It takes rows [n, DIM], which of them each id is, numbers [B, dense], labels [B] and weights.
    XLA is not asked to compile the layers: they take as long then.
    """

    def of_layers(vectors: Any, dense: Any, labels: Any, weights: Sequence[Any]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([vectors, *weights])
            hidden = tf.concat([vectors, dense], 1)
            for at in range(0, len(weights), 2):
                hidden = tf.nn.bias_add(tf.matmul(hidden, weights[at]), weights[at + 1])
                hidden = tf.nn.relu(hidden) if at + 2 < len(weights) else hidden
            logits = tf.squeeze(hidden, 1)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_mean(losses)
        return loss, *tape.gradient(loss, [vectors, *weights])

    def of_all(
        rows: Any, inverse: Any, dense: Any, labels: Any, weights: Sequence[Any]
    ) -> tuple[Any, Any, list[Any]]:
        vectors = tf.reshape(tf.gather(rows, inverse), [-1, SLOTS * DIM])
        loss, of_vectors, *of_weights = of_layers(vectors, dense, labels, weights)
        each = tf.reshape(of_vectors, [-1, DIM])
        return loss, tf.math.unsorted_segment_sum(each, inverse, tf.shape(rows)[0]), of_weights

    return of_all
