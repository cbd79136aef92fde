# SPDX-License-Identifier: Apache-2.0
"""train_text.py on several processes: the same steps as on one, up to rounding, whatever their number.

    torchrun --nproc-per-node 2 examples/train_text.py --parallel ddp|fsdp|sequence [--resume] ...

ddp: every rank has the model and a part of the batch. fsdp: every rank has a part of the model as well. sequence: every
rank has the model and a part of each sequence, for texts that are longer than one device holds. All three are PyTorch's
own; the operator's part is `rwkv6_ops.distributed` in the last. Checkpoints, in the folder train_text.dcp, are those of
torch.distributed.checkpoint and can be resumed in any of the three ways on any number of ranks.
"""

from __future__ import annotations

import atexit
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from corpus import Corpus
from rwkv6_lm import RWKV6
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from train_text import TextCurves, TextSettings, TextTrainer

import rwkv6_ops
from rwkv6_ops import distributed

WAYS = ("ddp", "fsdp", "sequence")


class ParallelTrainer(TextTrainer):
    """A `TextTrainer` that is one of the ranks of `group`. All ranks draw the same batches and take their part."""

    def __init__(self, corpus: Corpus, settings: TextSettings, way: str, group: dist.ProcessGroup) -> None:
        self.way, self.group = way, group
        self.rank, self.world = group.rank(), group.size()
        divided = settings.length if way == "sequence" else settings.batch
        if divided % self.world:
            raise ValueError(f"{'length' if way == 'sequence' else 'batch'}: {divided}, not for {self.world} ranks")
        sequence = partial(distributed.wkv6, group=group)
        super().__init__(corpus, settings, wkv=sequence if way == "sequence" else rwkv6_ops.wkv6)

    def prepare(self, model: RWKV6) -> nn.Module:
        if self.way == "fsdp":
            mesh = DeviceMesh.from_group(self.group, next(model.parameters()).device.type)
            for module in (model.blocks[0].ln0, *model.blocks, model):  # ln0 is called from outside its block
                fully_shard(module, mesh=mesh)
            return model
        if self.way == "sequence":
            for module in model.modules():
                if hasattr(module, "shift"):  # the models' other contact between tokens
                    module.shift = lambda x, last: distributed.token_shift(x, self.group)
        return nn.parallel.DistributedDataParallel(model, process_group=self.group)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Of this rank's part of the batch. The parts are equal, so the mean over ranks is that of the batch."""
        axis = 1 if self.way == "sequence" else 0
        return super().loss(x.chunk(self.world, axis)[self.rank], y.chunk(self.world, axis)[self.rank])

    def _mean(self, *numbers: float) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return (total / self.world).tolist()

    def step(self) -> float:
        """One batch; its loss, and the time so far, are the ranks' mean, so that all stop at the same step."""
        super().step()
        nats, seconds = self._mean(self.curves.train[-1][1], self.curves.seconds[-1])
        self.curves.train[-1], self.curves.seconds[-1] = (self.steps, nats), seconds
        return nats

    def validate(self) -> float:
        super().validate()
        (nats,) = self._mean(self.curves.validation[-1][1])
        self.curves.validation[-1] = (self.steps, nats)
        return nats

    def _stored(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "draw": self.draw.get_state(),
            "progress": {"settings": asdict(self.settings), "curves": asdict(self.curves)},
        }

    def save(self, path: Path) -> None:
        """All that `resume` needs, in the folder `path`: each rank writes what it has."""
        dcp.save(self._stored(), checkpoint_id=path, process_group=self.group)

    def resume(self, path: Path) -> None:
        """Take up what any number of ranks left, in any of the WAYS."""
        stored = self._stored()
        dcp.load(stored, checkpoint_id=path, process_group=self.group)
        self.check_settings(path, stored["progress"]["settings"])
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=stored["model"],
            optim_state_dict=stored["optimizer"],
        )
        self.draw.set_state(stored["draw"])
        self.curves = TextCurves(**stored["progress"]["curves"])

    def whole_model(self) -> RWKV6:
        """The model on one process, with all its weights. All ranks have to call."""
        weights = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        model = RWKV6(self.settings.model)
        if self.rank == 0 or self.way != "fsdp":
            model.load_state_dict(weights)
        return model


def start() -> dist.ProcessGroup:
    """The group of the processes that torchrun has started."""
    dist.init_process_group()
    atexit.register(dist.destroy_process_group)
    return dist.group.WORLD
