"""TensorFlow's `ParameterServerStrategy`: a worker and a server, all variables on the server.

Steps are scheduled by its `ClusterCoordinator`, one ahead, on one worker, which lives in this
process with the coordinator and reads its own data set. It asks for distinct rows and sends their
summed gradients; sparse Adagrad and Adam of Keras run on the server.
"""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.ctr.peers import tensorflow_net
from bench.ctr.peers.turns import Trainer, arrays, given_data, serve
from bench.ctr.shape import BATCH, CHECKED, DENSE, DIM, EACH, SLOTS, first_rows
from bench.ps.peers import tf_cluster

_AHEAD = 1  # steps scheduled beside the one that is waited for


class _Net:
    """The network on a cluster."""

    def __init__(self) -> None:
        tf = self._tf = tf_cluster.tensorflow(addons=False)
        cluster, self.servers = tf_cluster.start(1, addons=False)
        spec = tf.train.ClusterSpec(cluster)
        self._worker = tf.distribute.Server(spec, "worker", 0, protocol="grpc")
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
        self._strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        with self._strategy.scope():
            self._rows = tf.Variable(lambda: tf.zeros([SLOTS * EACH, DIM]), name="rows")
            self._weights = tensorflow_net.first_weights(tf)
            self._of_rows = tensorflow_net.adagrad(tf)
            self._of_top = tensorflow_net.adam(tf)
        for slot in range(SLOTS):
            own = tf.range(slot * EACH, (slot + 1) * EACH)
            self._rows.scatter_update(tf.IndexedSlices(first_rows(slot), own))
        self._backward = tensorflow_net.backward(tf)
        self._step = tf.function(self._stepped)
        self._data = iter(self._coordinator.create_per_worker_dataset(self._dataset))
        self._ahead: deque[Any] = deque()

    def step(self, number: int) -> float:
        self._ahead.append(self._coordinator.schedule(self._step, args=(self._data,)))
        ahead = _AHEAD if number >= CHECKED else 0
        return self._first() if len(self._ahead) > ahead else float("nan")

    def settle(self) -> None:
        while self._ahead:
            self._first()

    def read(self, numbers: NDArray[np.int64]) -> Any:
        return self._tf.gather(self._rows, numbers).numpy()

    def _first(self) -> float:
        return float(self._ahead.popleft().fetch())

    def _dataset(self) -> Any:
        steps = arrays(given_data())
        rows, dense, labels = (np.stack(one) for one in zip(*steps, strict=True))
        flat = rows.reshape(len(steps), BATCH * SLOTS)
        return self._tf.data.Dataset.from_tensor_slices((flat, dense, labels)).cache().repeat()

    def _stepped(self, batches: Any) -> Any:
        numbers, dense, labels = next(batches)
        dense = self._tf.ensure_shape(dense, [BATCH, DENSE])
        return self._strategy.run(self._trained, args=(numbers, dense, labels))

    def _trained(self, numbers: Any, dense: Any, labels: Any) -> Any:
        tf = self._tf
        unique, inverse = tf.unique(numbers)
        rows = tf.nn.embedding_lookup(self._rows, unique)
        weights = [tf.convert_to_tensor(weight) for weight in self._weights]
        loss, of_rows, of_weights = self._backward(rows, inverse, dense, labels, weights)
        shape = tf.constant([SLOTS * EACH, DIM], tf.int64)
        self._of_rows.apply_gradients([(tf.IndexedSlices(of_rows, unique, shape), self._rows)])
        self._of_top.apply_gradients(zip(of_weights, self._weights, strict=True))
        return loss


def make() -> Trainer:
    net = _Net()
    servers = [server.pid for server in net.servers]
    return Trainer(net.step, net.read, servers=servers, settle=net.settle)


if __name__ == "__main__":
    serve(make)
