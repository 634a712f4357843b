"""Models of images, lines and volumes for ``flops.py``: all kinds of convolutions with derived truths."""

from __future__ import annotations

import torch
from flop_case import Case, convolution_macs
from torch import nn


def lenet() -> Case:
    # 8 images of 32 x 32; each pool halves the side length.
    first = convolution_macs(8, 3, 32, (3, 3), (32, 32))
    forward = (
        first + convolution_macs(8, 32, 64, (3, 3), (16, 16)) + convolution_macs(8, 64, 128, (3, 3), (8, 8))
    )
    forward += 8 * (128 * 4 * 4) * 256 + 8 * 256 * 10
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128 * 4 * 4, 256), nn.ReLU(), nn.Dropout(), nn.Linear(256, 10)),
    )
    # Backward has two products for each one in forward. The images need no gradient, so conv1 has only one.
    images = torch.randn(8, 3, 32, 32)
    return Case(model=model, args=(images,), forward_macs=forward, backward_macs=2 * forward - first)


class Bottleneck(nn.Module):
    """1 x 1 to ``width``, 3 x 3, 1 x 1 to four times ``width``, with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            convolution = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.body(x) + self.shortcut(x))


def resnet50() -> Case:
    # One image of 224 x 224. The stem reduces it to 112, its pool to 56, the stages to 56, 28, 14 and 7.
    # The total is 4.089 GMAC; the literature says 4.09.
    stem = convolution_macs(1, 3, 64, (7, 7), (112, 112))
    forward, channels, side, blocks = stem, 64, 56, []
    for width, count, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            stride = 1 if index else first_stride
            after = side // stride
            forward += convolution_macs(1, channels, width, (1, 1), (side, side))
            forward += convolution_macs(1, width, width, (3, 3), (after, after))
            forward += convolution_macs(1, width, 4 * width, (1, 1), (after, after))
            if index == 0:  # the shortcut changes the number of channels
                forward += convolution_macs(1, channels, 4 * width, (1, 1), (after, after))
            blocks.append(Bottleneck(channels, width, stride))
            channels, side = 4 * width, after
    forward += 2048 * 1000
    first = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    model = nn.Sequential(*first, nn.MaxPool2d(3, 2, 1), *blocks, *last)
    image = torch.randn(1, 3, 224, 224)
    return Case(model=model, args=(image,), forward_macs=forward, backward_macs=2 * forward - stem)


def separable(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """A 3 x 3 convolution per channel, then a 1 x 1 convolution of all channels."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        *(nn.BatchNorm2d(inputs), nn.ReLU6()),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        *(nn.BatchNorm2d(outputs), nn.ReLU6()),
    )


def mobilenet() -> Case:
    # 2 images of 64 x 64. The stem reduces them to 32, the blocks to 32, 16 and 16.
    stem = convolution_macs(2, 3, 16, (3, 3), (32, 32))
    forward = stem
    for inputs, outputs, side in ((16, 32, 32), (32, 64, 16), (64, 64, 16)):
        forward += convolution_macs(2, inputs, inputs, (3, 3), (side, side), groups=inputs)
        forward += convolution_macs(2, inputs, outputs, (1, 1), (side, side))
    forward += convolution_macs(2, 64, 64, (3, 3), (16, 16), groups=4) + 2 * 64 * 10
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        *(separable(16, 32, 1), separable(32, 64, 2), separable(64, 64, 1)),
        nn.Conv2d(64, 64, 3, padding=1, groups=4),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    images = torch.randn(2, 3, 64, 64)
    return Case(model=model, args=(images,), forward_macs=forward, backward_macs=2 * forward - stem)


class UNet(nn.Module):
    """Down once, up once by a transposed convolution, with a skip connection; then up by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.middle, self.up = nn.Conv2d(32, 32, 3, padding=1), nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.joined, self.last = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(16, 2, 1)
        self.enlarge = nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.first(x).relu()
        low = self.middle(self.down(skip).relu()).relu()
        joined = self.joined(torch.cat([skip, self.up(low)], 1)).relu()
        return self.last(self.enlarge(joined))


def unet() -> Case:
    # 2 images of 32 x 32; 16 x 16 below, 64 x 64 at the end.
    first = convolution_macs(2, 3, 16, (3, 3), (32, 32))
    forward = (
        first + convolution_macs(2, 16, 32, (3, 3), (16, 16)) + convolution_macs(2, 32, 32, (3, 3), (16, 16))
    )
    forward += 2 * (16 * 16) * 32 * 16 * (2 * 2)  # transposed: each input element covers the whole kernel
    forward += convolution_macs(2, 32, 16, (3, 3), (32, 32)) + convolution_macs(2, 16, 2, (1, 1), (64, 64))
    images = torch.randn(2, 3, 32, 32)
    return Case(model=UNet(), args=(images,), forward_macs=forward, backward_macs=2 * forward - first)


class LineAndVolume(nn.Module):
    """A one-dimensional and a three-dimensional branch."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Sequential(
            nn.Conv1d(4, 8, 5, padding="same"),
            nn.Conv1d(8, 8, 3, padding=1, groups=2),
            nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1),
        )
        self.volume = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ConvTranspose3d(4, 2, 2, stride=2))

    def forward(self, line: torch.Tensor, volume: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.line(line), self.volume(volume)


def line_and_volume() -> Case:
    # 2 lines of 64 points, 2 volumes of 8 x 8 x 8. Transposed convolutions count by their input elements.
    first_line = convolution_macs(2, 4, 8, (5,), (64,))
    first_volume = convolution_macs(2, 1, 4, (3, 3, 3), (8, 8, 8))
    forward = first_line + convolution_macs(2, 8, 8, (3,), (64,), groups=2) + 2 * 64 * 8 * 4 * 4
    forward += first_volume + 2 * 8**3 * 4 * 2 * 2**3
    return Case(
        model=LineAndVolume(),
        args=(torch.randn(2, 4, 64), torch.randn(2, 1, 8, 8, 8)),
        forward_macs=forward,
        backward_macs=2 * forward - first_line - first_volume,
    )


def fourier_layer() -> Case:
    # 2 signals of 32 points: a linear layer to 8 channels and one back. In between, each of 8 frequencies has
    # 8 x 8 complex weights; a complex multiply-add is four real ones. The transforms are excluded.
    lift, product, back = 2 * 32 * 8, 4 * (2 * 8 * 8 * 8), 2 * 32 * 8
    forward = lift + product + back
    return Case(
        model=FourierLayer(),
        args=(torch.randn(2, 32, 1),),
        forward_macs=forward,
        backward_macs=2 * forward - lift,
    )


class FourierLayer(nn.Module):
    """Mixes channels in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.back = nn.Linear(1, 8), nn.Linear(8, 1)
        self.weight = nn.Parameter(torch.randn(8, 8, 8, dtype=torch.cfloat) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.lift(x).transpose(1, 2))
        mixed = torch.zeros_like(spectrum)
        mixed[..., :8] = torch.einsum("bim,iom->bom", spectrum[..., :8], self.weight)
        return self.back(torch.fft.irfft(mixed, n=x.shape[1]).transpose(1, 2))


VISION_MODELS = {
    "lenet": lenet,
    "resnet50": resnet50,
    "mobilenet": mobilenet,
    "unet": unet,
    "conv1d and conv3d": line_and_volume,
    "fourier layer": fourier_layer,
}
