"""Data whose samples show their origin: value, random numbers, worker number, process.

This module imports little, as spawned workers import it too.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

SIZE = 12


def sample(index: int) -> dict[str, Any]:
    drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
    return {"x": torch.full((8,), float(index)), "drawn": drawn} | maker()


def maker() -> dict[str, int]:
    info = get_worker_info()
    return {"worker": -1 if info is None else info.id, "process": os.getpid()}


def twice(one: dict[str, Any]) -> dict[str, Any]:
    return one | {"x": 2 * one["x"]}


class AddNoise:
    def __call__(self, one: dict[str, Any]) -> dict[str, Any]:
        return one | {"x": one["x"] + torch.rand(8)}


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, one: Any) -> Any:
        for transform in self.transforms:
            one = transform(one)
        return one


class Mapped(Dataset):
    def __init__(self, transform: Any = None, size: int = SIZE) -> None:
        self.transform = transform or Compose(twice, AddNoise())
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.transform(sample(index))


class Slow(Dataset):
    """Each row takes the given CPU time and sleep."""

    def __init__(self, cpu_s: float, sleep_s: float, size: int = 80) -> None:
        self.cpu_s, self.sleep_s, self.size = cpu_s, sleep_s, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        end = time.thread_time() + self.cpu_s
        while time.thread_time() < end:
            pass
        time.sleep(self.sleep_s)
        return torch.ones(2)


def draw_more(worker: int) -> None:
    """A user's ``worker_init_fn``."""
    random.seed(100 + worker)
    np.random.seed(100 + worker)
