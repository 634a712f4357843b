"""Data for the examples: handwritten digits with a realistic data loading cost.

scikit-learn ships 1797 scanned digits of 8x8 pixels, so nothing is downloaded. The dataset keeps them in
memory as PNG files. It decodes, augments and converts a sample each time it's requested, as an image dataset
on disk does.
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

CANVAS = 56  # pixels per side while rotating and shifting; larger than the result to keep edges smooth
SIDE = 32  # pixels per side of the result, as in CIFAR-10


class Digits(Dataset[tuple[Tensor, int]]):
    """Digits as (image, label) pairs; images are 3x32x32 floats in 0..1, augmented differently each time."""

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
    """Rotate, shift, recolor and add grain to an RGB image; returns 3x32x32 floats in 0..1.

    Random numbers come from torch, because DataLoader seeds torch's generator differently in every worker.
    NumPy's global generator would give every worker the same numbers.
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
    """Encode an 8x8 scan with gray values 0..16 as PNG."""
    buffer = io.BytesIO()
    Image.fromarray((scan * 255 / 16).astype(np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()
