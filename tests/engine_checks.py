# SPDX-License-Identifier: Apache-2.0
"""What ranks do for tests/test_engines.py: the operator inside PyTorch's own engines, against one process."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import rwkv6_ops

CHANNELS, HEADS, VOCAB = 16, 2, 11


class Block(nn.Module):
    """The operator between linear layers, as small as a layer can be; `recompute` checkpoints its activations."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(CHANNELS, 4 * CHANNELS)
        self.bonus = nn.Parameter(torch.randn(HEADS, CHANNELS // HEADS))
        self.output = nn.Linear(CHANNELS, CHANNELS)
        self.recompute = recompute

    def mix(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        r, k, v, w = self.project(x).unflatten(-1, (4, HEADS, -1)).unbind(-3)
        o, state = rwkv6_ops.wkv6(r, k, v, w, self.bonus, decay="raw", initial_state=state, output_final_state=True)
        return x + self.output(o.flatten(-2)), state

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(lambda y: self.mix(y)[0], x, use_reentrant=False)
        return self.mix(x)[0]


class Model(nn.Module):
    def __init__(self, recompute: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, CHANNELS)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(layers))
        self.head = nn.Linear(CHANNELS, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(**options: object) -> Model:
    torch.manual_seed(0)
    return Model(**options).double()


def tokens() -> tuple[Tensor, Tensor]:
    x = torch.randint(VOCAB, (4, 13), generator=torch.Generator().manual_seed(1))
    return x[:, :-1], x[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradients_of_one_process(**options: object) -> dict[str, Tensor]:
    alone = model(**options)
    x, y = tokens()
    loss_of(alone(x), y).backward()
    return {name: p.grad for name, p in alone.named_parameters()}


def equal(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, want[name], rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


def data_parallel(rank: int, group: dist.ProcessGroup) -> None:
    parallel = nn.parallel.DistributedDataParallel(model(), process_group=group)
    part = slice(rank * 4 // group.size(), (rank + 1) * 4 // group.size())
    x, y = tokens()
    loss_of(parallel(x[part]), y[part]).backward()
    equal({name: p.grad for name, p in parallel.module.named_parameters()}, gradients_of_one_process())


def fully_sharded(rank: int, group: dist.ProcessGroup, recompute: bool) -> None:
    mesh, sharded = DeviceMesh.from_group(group, "cpu"), model(recompute=recompute)
    for module in (*sharded.blocks, sharded):
        fully_shard(module, mesh=mesh)
    part = slice(rank * 4 // group.size(), (rank + 1) * 4 // group.size())
    x, y = tokens()
    loss_of(sharded(x[part]), y[part]).backward()
    equal({name: p.grad.full_tensor() for name, p in sharded.named_parameters()}, gradients_of_one_process())


class Stage(nn.Module):
    """One block a rank; the first embeds, the last has the head."""

    def __init__(self, whole: Model, rank: int, last: bool) -> None:
        super().__init__()
        self.embed = whole.embed if rank == 0 else nn.Identity()
        self.block, self.head = whole.blocks[rank], whole.head if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)))


def pipeline(rank: int, group: dist.ProcessGroup) -> None:
    """Stages on ranks, the batch in micro-batches: torch's own schedule, activations handed over by it."""
    world = group.size()
    whole = model(layers=world)
    stage = PipelineStage(Stage(whole, rank, rank == world - 1), rank, world, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=world, loss_fn=loss_of)
    x, y = tokens()
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(**({"target": y, "losses": []} if rank == world - 1 else {}))
    want = gradients_of_one_process(layers=world)
    found = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert f"blocks.{rank}.bonus" in found
    equal(found, {name: want[name] for name in found})


def pipeline_of_sequence_pieces(rank: int, group: dist.ProcessGroup) -> None:
    """Micro-batches along time: each stage hands the state of one micro-batch to its next one, the stages the
    activations to each other, and so do gradients on the way back."""
    world, pieces = group.size(), 3
    whole = model(layers=world)
    stage = Stage(whole, rank, rank == world - 1)
    x, y = tokens()
    state, sent, received, losses = None, [], [], []
    for part, target in zip(x.chunk(pieces, 1), y.chunk(pieces, 1), strict=True):
        if rank == 0:
            inputs = whole.embed(part)
        else:
            inputs = torch.empty(*part.shape, CHANNELS, dtype=torch.float64)
            dist.recv(inputs, group=group, group_src=rank - 1)
            inputs.requires_grad_()
            received.append(inputs)
        out, state = stage.block.mix(inputs, state)
        if rank == world - 1:
            losses.append(loss_of(stage.head(out), target) * part.shape[1] / x.shape[1])
        else:
            dist.send(out.detach(), group=group, group_dst=rank + 1)
            sent.append(out)
    if rank < world - 1:  # the state ties the micro-batches together: their gradients come in one piece
        back = [torch.empty_like(out) for out in sent]
        for gradient in back:
            dist.recv(gradient, group=group, group_src=rank + 1)
        torch.autograd.backward(sent, back)
    else:
        sum(losses).backward()
    for inputs in received:
        dist.send(inputs.grad, group=group, group_dst=rank - 1)
    want = gradients_of_one_process(layers=world)
    equal(
        {name: p.grad for name, p in whole.named_parameters() if p.grad is not None},
        {name: want[name] for name, p in whole.named_parameters() if p.grad is not None},
    )
    assert whole.blocks[rank].bonus.grad is not None


# ---- DTensor ----


def _operator_inputs() -> list[Tensor]:
    g = torch.Generator().manual_seed(2)
    r, k, v, w = (torch.randn(4, 6, 4, 3, generator=g, dtype=torch.float64) for _ in range(4))
    u, state = torch.randn(4, 3, generator=g, dtype=torch.float64), torch.randn(4, 4, 3, 3, generator=g).double()
    return [r, k, v, w, u, state]


def sharded_without_communication(rank: int, group: dist.ProcessGroup, what: str, with_state: bool, learning: bool):
    """Forward and backward on DTensors: no collective, and the right numbers."""
    mesh = DeviceMesh.from_group(group, "cpu")
    tokens_at, bonus_at, state_at = {
        "batch": (Shard(0), Replicate(), Shard(0)),
        "heads": (Shard(2), Shard(0), Shard(1)),
    }[what]

    def operator(r, k, v, w, u, state):
        return rwkv6_ops.wkv6(
            r, k, v, w, u, initial_state=state if with_state else None, decay="raw", output_final_state=True
        )

    given = _operator_inputs()
    count = 6 if with_state else 5
    places = [tokens_at] * 4 + [bonus_at, state_at]
    shared = [distribute_tensor(y, mesh, [p]) for y, p in zip(given, places, strict=True)][:count]
    whole = [y.clone() for y in given][:count]
    call = operator if with_state else lambda *x: operator(*x, None)
    if not learning:
        with CommDebugMode() as counter, torch.no_grad():
            o = rwkv6_ops.wkv6(*shared[:5], decay="raw")[0]
        assert counter.get_total_counts() == 0, counter.get_comm_counts()
        assert o.placements == (tokens_at,)
        torch.testing.assert_close(o.full_tensor(), rwkv6_ops.wkv6(*whole[:5], decay="raw")[0])
        return
    leaves = [y.requires_grad_() for y in shared]
    with CommDebugMode() as counter:
        o, state = call(*leaves)
        gradients = torch.autograd.grad((o, state), leaves, (o.detach(), state.detach()))
    assert counter.get_total_counts() == 0, counter.get_comm_counts()
    assert gradients[4].placements == ((Partial(),) if what == "batch" else (Shard(0),))
    leaves = [y.requires_grad_() for y in whole]
    want = call(*leaves)
    want_gradients = torch.autograd.grad(want, leaves, [y.detach() for y in want])
    torch.testing.assert_close(o.full_tensor(), want[0])
    torch.testing.assert_close(state.full_tensor(), want[1])
    for x, y in zip(gradients, want_gradients, strict=True):
        torch.testing.assert_close(x.full_tensor(), y)


def state_without_communication(rank: int, group: dist.ProcessGroup) -> None:
    mesh, (_, k, v, w, *_) = DeviceMesh.from_group(group, "cpu"), _operator_inputs()
    shared = [distribute_tensor(y, mesh, [Shard(2)]) for y in (k, v, w)]
    with CommDebugMode() as counter:
        found = rwkv6_ops.wkv6_state(*shared, decay="raw")
    assert counter.get_total_counts() == 0
    for x, y in zip(found, rwkv6_ops.wkv6_state(k, v, w, decay="raw"), strict=True):
        assert isinstance(x, DTensor)
        torch.testing.assert_close(x.full_tensor(), y)


def sharded_over_time(rank: int, group: dist.ProcessGroup) -> list[tuple[str, str]]:
    mesh, given = DeviceMesh.from_group(group, "cpu"), _operator_inputs()
    shared = [distribute_tensor(y, mesh, [Shard(1) if y.dim() == 4 else Replicate()]) for y in given[:5]]
    from distributed_checks import raised

    return [raised(rwkv6_ops.wkv6, *shared), raised(rwkv6_ops.wkv6_state, *shared[1:4])]


# ---- examples/train_text.py ----


def trained(rank: int, group: dist.ProcessGroup, way: str, steps: int, folder: str, resume: bool) -> tuple:
    """Steps of the example's training; (the losses so far, a few weights)."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import parallel
    from corpus import Corpus
    from rwkv6_lm import Config
    from train_text import TextSettings

    text = torch.randint(40, (4000,), generator=torch.Generator().manual_seed(0))
    model = Config(vocab=64, channels=32, heads=2, mix_rank=8, decay_rank=8)
    settings = TextSettings(model=model, batch=4, length=48, steps=6, validate_every=4, validation_batches=1)
    trainer = parallel.ParallelTrainer(Corpus(text[:-500], text[-500:]), settings, way, group)
    if resume:
        trainer.resume(Path(folder))
    while trainer.steps < steps:
        trainer.step()
    trainer.save(Path(folder))
    weights = trainer.whole_model().state_dict()["blocks.1.att.time_faaaa"] if rank == 0 else trainer.whole_model()
    return trainer.curves.train, trainer.validate(), weights if rank == 0 else None
