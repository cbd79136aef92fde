# SPDX-License-Identifier: Apache-2.0
"""The operator inside the engines that people train with, on gloo ranks: gradients equal those of one process."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import engine_checks as checks
import pytest
import torch
from ranks import Ranks


@pytest.mark.parametrize("world", [2, 4])
def test_distributed_data_parallel(world: int, ranks: Ranks):
    ranks.run(world, checks.data_parallel)


@pytest.mark.parametrize(("world", "recompute"), [(2, True), (4, False), (4, True)])
def test_fully_shard_with_activation_checkpointing(world: int, recompute: bool, ranks: Ranks):
    ranks.run(world, checks.fully_sharded, recompute)


@pytest.mark.parametrize("world", [2, 4])
def test_pipeline_of_stages_and_micro_batches(world: int, ranks: Ranks):
    ranks.run(world, checks.pipeline)


@pytest.mark.parametrize("world", [2, 4])
def test_pipeline_hands_states_from_micro_batch_to_micro_batch(world: int, ranks: Ranks):
    ranks.run(world, checks.pipeline_of_sequence_pieces)


@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("what", ["batch", "heads"])
def test_dtensors_sharded_over(what: str, with_state: bool, learning: bool, ranks: Ranks):
    ranks.run(2, checks.sharded_without_communication, what, with_state, learning)


def test_the_state_alone_of_dtensors(ranks: Ranks):
    ranks.run(2, checks.state_without_communication)


def test_dtensors_sharded_over_time_are_refused_and_told_where_to_go(ranks: Ranks):
    want = "{}: sharded over time (dimension 1), expected batch or heads: "
    want += "rwkv6_ops.distributed.wkv6 takes each rank's own tokens"
    for answers in ranks.run(2, checks.sharded_over_time):
        assert answers == [("ValueError", want.format(name)) for name in ("r", "k")]


@pytest.mark.parametrize("way", ["ddp", "fsdp", "sequence"])
def test_training_goes_on_with_another_number_of_ranks(way: str, ranks: Ranks, tmp_path: Path):
    """examples/train_text.py --parallel: three steps on two ranks, three more on four: those of one rank, ddp."""
    if not (Path(__file__).parents[1] / "examples").is_dir():
        pytest.skip("not tested: the examples, which are in the checkout only")
    (want, validation, weights), *_ = ranks.run(1, checks.trained, "ddp", 6, str(tmp_path / "one"), False)
    ranks.run(2, checks.trained, way, 3, str(tmp_path / way), False)
    for losses, validated, others in ranks.run(4, checks.trained, way, 6, str(tmp_path / way), True):
        assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=1e-4, atol=0)
        assert validated == pytest.approx(validation, rel=1e-4)
        if others is not None:
            torch.testing.assert_close(others, weights, rtol=1e-3, atol=1e-4)


def test_threads_with_a_replica_each():
    """What DataParallel does: replicas of a module on threads of one process, forward and backward together."""
    x, y = checks.tokens()
    alone = checks.model()
    replicas = [checks.model() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(lambda replica, part: replica(part), replicas, x.chunk(4)))
    checks.loss_of(torch.cat(outputs), y).backward()
    checks.loss_of(alone(x), y).backward()
    for name, p in alone.named_parameters():
        total = sum(dict(replica.named_parameters())[name].grad for replica in replicas)
        torch.testing.assert_close(total, p.grad, rtol=1e-12, atol=1e-13)


def test_a_keras_layer_calls_the_operator(python):
    """Keras 3 on the torch backend, in a process of its own: the backend is chosen at import."""
    if not importlib.util.find_spec("keras"):
        pytest.skip("no keras: the operator in a Keras layer was not tried")
    run = python(KERAS, KERAS_BACKEND="torch")
    assert run.returncode == 0, run.stderr[-3000:]
    first, last, error = map(float, run.stdout.split()[-3:])
    assert last < first
    assert error < 1e-5


KERAS = """
import keras, numpy, rwkv6_ops, torch
torch.manual_seed(0); keras.utils.set_random_seed(0); torch.set_num_threads(1)

class TimeMix(keras.layers.Layer):
    def build(self, shape):
        self.project = keras.layers.Dense(4 * shape[-1])
        self.bonus = self.add_weight(shape=(2, shape[-1] // 2), initializer="random_normal")
    def call(self, x):
        r, k, v, w = self.project(x).unflatten(-1, (4, 2, -1)).unbind(-3)
        return x + rwkv6_ops.wkv6(r, k, v, w, self.bonus.value, decay="raw")[0].flatten(-2)

model = keras.Sequential([keras.layers.Embedding(11, 16), TimeMix(), keras.layers.Dense(11)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x = numpy.random.default_rng(0).integers(0, 11, (32, 12))
history = model.fit(x, x, epochs=3, verbose=0).history["loss"]
layer, h = model.layers[1], torch.randn(2, 5, 16)
r, k, v, w = layer.project(h).unflatten(-1, (4, 2, -1)).unbind(-3)
want = h + rwkv6_ops.reference.wkv6(r, k, v, w, layer.bonus.value, decay="raw")[0].flatten(-2)
print(history[0], history[-1], float((layer(h) - want).abs().max()))
"""
