"""TFRA: a worker, and its cuckoo hash tables on a TensorFlow server, which take any key.

The worker has the dense layers, asks for distinct rows and sends their summed gradients; look-up,
exact Adagrad and `upsert` run on the server, in one function with the step. Weights and sums of
squares are two tables, as TFRA's optimizer wrapper keeps them.
"""

from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.ctr.peers import tensorflow_net
from bench.ctr.peers.turns import Trainer, arrays, given_data, serve
from bench.ctr.shape import (
    ACCUMULATOR,
    BATCH,
    DENSE,
    DIM,
    EACH,
    EPSILON,
    LEARNING_RATE,
    SLOTS,
    Data,
    first_rows,
)
from bench.ps.peers import tf_cluster

_SERVER = tf_cluster.device(0)


class _Net:
    """The network on a cluster."""

    def __init__(self) -> None:
        tf = self._tf = tf_cluster.tensorflow(addons=True)
        cluster, self.servers = tf_cluster.start(1, addons=True)
        spec = tf.train.ClusterSpec(cluster)
        tf.config.experimental_connect_to_cluster(spec, job_name="worker", task_index=0)
        self._rows, self._squares = self._table("rows", 0.0), self._table("squares", ACCUMULATOR)
        self._fill(np.unique(Data.load(given_data()).rows))
        self._weights = tensorflow_net.first_weights(tf)
        self._of_top = tensorflow_net.adam(tf)
        self._backward = tensorflow_net.backward(tf)
        self._step = tf.function(self._trained)
        self._batches = [
            (tf.constant(rows.reshape(-1)), tf.constant(dense), tf.constant(labels))
            for rows, dense, labels in arrays(given_data())
        ]

    def step(self, number: int) -> float:
        return float(self._step(*self._batches[number % len(self._batches)]))

    def read(self, numbers: NDArray[np.int64]) -> Any:
        return self._rows.lookup(self._tf.constant(numbers)).numpy()

    def _table(self, name: str, first: float) -> Any:
        dynamic: Any = import_module("tensorflow_recommenders_addons.dynamic_embedding")
        return dynamic.get_variable(
            name,
            key_dtype=self._tf.int64,
            value_dtype=self._tf.float32,
            dim=DIM,
            initializer=first,
            devices=[_SERVER],
        )

    def _fill(self, numbers: NDArray[np.int64]) -> None:
        """Rows that the data has, as they begin: a table makes its own with one value."""
        for slot in range(SLOTS):
            own = numbers[numbers // EACH == slot]
            keys = self._tf.constant(own)
            self._rows.upsert(keys, self._tf.constant(first_rows(slot)[own % EACH]))

    def _trained(self, numbers: Any, dense: Any, labels: Any) -> Any:
        tf = self._tf
        dense = tf.ensure_shape(dense, [BATCH, DENSE])
        unique, inverse = tf.unique(numbers)
        with tf.device(_SERVER):
            rows = self._rows.lookup(unique)
        weights = [tf.convert_to_tensor(weight) for weight in self._weights]
        loss, of_rows, of_weights = self._backward(rows, inverse, dense, labels, weights)
        with tf.device(_SERVER):
            squares = self._squares.lookup(unique) + of_rows * of_rows
            change = LEARNING_RATE * of_rows / (tf.sqrt(squares) + EPSILON)
            done = [
                self._rows.upsert(unique, rows - change),
                self._squares.upsert(unique, squares),
            ]
        self._of_top.apply_gradients(zip(of_weights, self._weights, strict=True))
        with tf.control_dependencies(done):
            return tf.identity(loss)


def make() -> Trainer:
    net = _Net()
    return Trainer(net.step, net.read, servers=[server.pid for server in net.servers])


if __name__ == "__main__":
    serve(make)
