"""The click model on TensorFlow's ParameterServerStrategy.

    python click_tf.py DATA.npz BATCH WARM STEPS PORT TOGETHER

It starts itself: a coordinator, two workers, a server. Every variable is on the server, workers are
asynchronous. Written as well as that library allows: ids are renumbered beforehand, so that a table
is one dense variable; only distinct rows are fetched; updates are the fused ops of TensorFlow's own
optimizers, run where the variable is; TOGETHER steps in one call; tf.data draws whole batches, by
one gather from each column, not sample by sample.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import numpy as np
import tensorflow as tf

WORKERS, DIM = 2, 16
LR, WIDE_LR, NETWORK_LR, L1, BETA = 0.05, 0.05, 0.02, 0.001, 1.0


def cluster(port: int) -> dict[str, list[str]]:
    at = lambda i: f"127.0.0.1:{port + i}"
    return {
        "worker": [at(1 + i) for i in range(WORKERS)],
        "ps": [at(0)],
        "chief": [at(1 + WORKERS)],
    }


def serve(kind: str, index: int, port: int) -> None:
    settings = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=2
    )
    spec = tf.train.ClusterSpec(cluster(port))
    tf.distribute.Server(
        spec, job_name=kind, task_index=index, protocol="grpc", config=settings, start=True
    ).join()


class Model:
    def __init__(self, columns: int, numbers: int, deep_rows: int, wide_rows: int):
        dice = np.random.default_rng(0)
        make = lambda *shape, bound: tf.Variable(
            dice.uniform(-bound, bound, shape).astype(np.float32)
        )
        zeros = lambda *shape: tf.Variable(np.zeros(shape, np.float32))
        self.deep, self.deep_squares = make(deep_rows, DIM, bound=0.05), zeros(deep_rows, DIM)
        self.wide, self.wide_n, self.wide_z = (zeros(wide_rows, 1) for _ in range(3))
        sizes = [columns * DIM + numbers, 64, 32, 1]
        self.network = []
        for i, o in itertools.pairwise(sizes):
            self.network += [make(i, o, bound=i**-0.5), make(o, bound=i**-0.5)]
        self.squares = [zeros(*v.shape) for v in self.network]

    def logits(self, network, deep, wide, numbers):
        x = tf.concat([tf.reshape(deep, [tf.shape(numbers)[0], -1]), numbers], 1)
        for i in range(0, len(network), 2):
            x = tf.matmul(x, network[i]) + network[i + 1]
            x = tf.nn.relu(x) if i + 2 < len(network) else x
        return tf.squeeze(x + tf.reduce_sum(wide, 1), 1)

    def step(self, ids, crossed, numbers, label):
        shape, wide_shape = tf.shape(ids), tf.shape(crossed)
        deep_ids, deep_at = tf.unique(tf.reshape(ids, [-1]))
        wide_ids, wide_at = tf.unique(tf.reshape(crossed, [-1]))
        deep, wide = tf.gather(self.deep, deep_ids), tf.gather(self.wide, wide_ids)
        network = [v.read_value() for v in self.network]
        with tf.GradientTape() as tape:
            tape.watch([deep, wide, *network])
            found = tf.reshape(tf.gather(deep, deep_at), [shape[0], -1])
            added = tf.reshape(tf.gather(wide, wide_at), [wide_shape[0], -1, 1])
            logits = self.logits(network, found, added, numbers)
            loss = tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(labels=label, logits=logits)
            )
        deep_grad, wide_grad, *grads = tape.gradient(loss, [deep, wide, *network])
        # asynchronous: a worker's gradient is that of its own batch
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=self.deep.handle,
            accum=self.deep_squares.handle,
            lr=LR,
            epsilon=1e-10,
            grad=tf.convert_to_tensor(deep_grad) / WORKERS,
            indices=deep_ids,
        )
        tf.raw_ops.ResourceSparseApplyFtrlV2(
            var=self.wide.handle,
            accum=self.wide_n.handle,
            linear=self.wide_z.handle,
            grad=tf.convert_to_tensor(wide_grad) / WORKERS,
            indices=wide_ids,
            lr=WIDE_LR,
            l1=L1,
            l2=BETA / WIDE_LR / 2,
            l2_shrinkage=0.0,
            lr_power=-0.5,
        )
        for v, s, g in zip(self.network, self.squares, grads, strict=True):
            tf.raw_ops.ResourceApplyAdagradV2(
                var=v.handle, accum=s.handle, lr=NETWORK_LR, epsilon=1e-10, grad=g
            )


def coordinate(path: str, batch: int, warm: int, steps: int, port: int, together: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    data = dict(np.load(path).items())
    spec = tf.train.ClusterSpec(cluster(port))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, rpc_layer="grpc", task_type="chief", task_id=0
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = Model(
            data["ids"].shape[1],
            data["numbers"].shape[1],
            int(data["deep_rows"]),
            int(data["wide_rows"]),
        )
    columns = tuple(data[k] for k in ("ids", "crossed", "numbers", "label"))

    samples = len(columns[-1])

    def epoch(_):
        order = tf.random.shuffle(tf.range(samples))[: samples // batch * batch]
        return tf.data.Dataset.from_tensor_slices(tf.reshape(order, [-1, batch]))

    def batches() -> tf.data.Dataset:
        whole = tuple(tf.constant(column) for column in columns)
        drawn = tf.data.Dataset.counter().flat_map(epoch)
        return drawn.map(lambda index: tuple(tf.gather(c, index) for c in whole)).prefetch(4)

    iterator = iter(coordinator.create_per_worker_dataset(tf.function(batches)))

    @tf.function
    def several(it):
        for _ in tf.range(together):
            model.step(*next(it))

    def run(n: int) -> float:
        start = time.perf_counter()
        for _ in range(-(-n // together)):
            coordinator.schedule(several, args=(iterator,))
        coordinator.join()
        return time.perf_counter() - start

    run(warm * WORKERS)
    calls = -(-steps * WORKERS // together)
    seconds = run(steps * WORKERS)
    deep, wide = model.deep.numpy(), model.wide.numpy()
    network = [v.numpy() for v in model.network]
    logits = model.logits(
        network,
        tf.constant(deep[data["test_ids"]]),
        tf.constant(wide[data["test_crossed"]]),
        data["test_numbers"],
    )
    loss = tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(labels=data["test_label"], logits=logits)
    )
    print(
        json.dumps({"samples_per_s": calls * together * batch / seconds, "log_loss": float(loss)}),
        flush=True,
    )


def main() -> None:
    if sys.argv[1] in ("worker", "ps"):
        serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
        return
    path, batch, warm, steps, port, together = sys.argv[1], *map(int, sys.argv[2:])
    roles = [("ps", 0), *(("worker", i) for i in range(WORKERS))]
    others = [
        subprocess.Popen([sys.executable, __file__, kind, str(i), str(port)]) for kind, i in roles
    ]
    try:
        coordinate(path, batch, warm, steps, port, together)
    finally:
        for process in others:
            process.kill()
        for process in others:
            process.wait()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the servers are gone: its threads would wait for them
