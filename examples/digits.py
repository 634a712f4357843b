"""The data of the examples: real handwritten digits, fed through a loader that costs what a loader costs.

scikit-learn ships 1797 scanned digits of 8x8 pixels, so nothing is downloaded. They are packed as PNG once,
in memory; from then on every sample is decoded, augmented and turned into a tensor each time it is asked for,
which is what the loader of an image data set on a disk does all day.
"""

from __future__ import annotations

import io

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_modelprof.errors import require

require("sklearn", "PIL", extra="examples", where="examples/digits.py")

from PIL import Image, ImageEnhance  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

CANVAS = (
    56  # the side on which images are turned and shifted; finer than the result, so that edges stay smooth
)
SIDE = 32  # the side of the finished image, that of CIFAR-10


class Digits(Dataset[tuple[Tensor, int]]):
    """The digits as (image of 3x32x32 floats in 0..1, label) pairs; another augmentation at every access."""

    def __init__(self) -> None:
        scans = load_digits()
        self.files = [_to_png(scan) for scan in scans.images]
        self.labels = [int(label) for label in scans.target]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(io.BytesIO(self.files[index])) as image:
            return augment(image.convert("RGB")), self.labels[index]


def augment(image: Image.Image) -> Tensor:
    """Turns, shifts, recolours and adds grain to an RGB image; returns 3x32x32 floats in 0..1.

    The random numbers come from torch because DataLoader seeds torch's generator anew in every worker, from
    the run's seed. Numpy's global generator would give every worker the same numbers.
    """
    angle, x, y, brightness, contrast, color = torch.rand(6).tolist()
    margin = CANVAS // 8

    image = image.resize((CANVAS, CANVAS), Image.Resampling.BICUBIC)
    image = image.rotate(30 * angle - 15, Image.Resampling.BICUBIC)
    left, top = round(margin * x), round(margin * y)
    size = CANVAS - margin
    box = (left, top, left + size, top + size)
    image = image.resize((SIDE, SIDE), Image.Resampling.LANCZOS, box=box)

    image = ImageEnhance.Brightness(image).enhance(0.7 + 0.6 * brightness)
    image = ImageEnhance.Contrast(image).enhance(0.7 + 0.6 * contrast)
    image = ImageEnhance.Color(image).enhance(0.7 + 0.6 * color)

    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    grain = 0.05 * torch.randn(pixels.shape)
    return (pixels + grain).clamp(0, 1)


def _to_png(scan: np.ndarray) -> bytes:
    """Packs an 8x8 scan with grey values 0..16 as a PNG file in memory."""
    buffer = io.BytesIO()
    Image.fromarray((scan * 255 / 16).astype(np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()
