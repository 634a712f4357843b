"""What the profiler sees in the workers of data libraries, and whether their data stays bit-identical.

    python benchmarks/worker_libraries.py
    python benchmarks/worker_libraries.py albumentations webdataset --methods fork spawn

Each library gets a small generated dataset, with its own transforms and one user transform that sleeps 5 ms.
A Trainer fits it with two workers, without and with the callback, each fit in a separate process. All batches
are hashed. Libraries that aren't installed are skipped, and the last lines list them.

The table shows which of the library's transforms here were named, and which line the verdict names. That
should be the sleeping statement.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import inspect
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

METHODS: Final = ("fork", "spawn", "forkserver")
SAMPLES, BATCH, SIDE, SLEEP_S, WORKERS = 400, 4, 48, 0.005, 2


def picture(index: int) -> np.ndarray:
    """Return a noise image that only depends on the index."""
    return np.random.default_rng(index).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def sleeping_transform(sample: Any, **_: Any) -> Any:
    """The user's transform, which sleeps 5 ms."""
    time.sleep(SLEEP_S)
    return sample


SLEEPS_AT: Final = inspect.getsourcelines(sleeping_transform)[1] + 2


def as_array(image: Any) -> np.ndarray:
    """Convert a PIL image to an array."""
    return np.array(image)


class Pictures(Dataset):
    """Image files, each opened by PIL, with a transform of the whole image.

    Args:
        folder: where to create the files.
        transform: of one image.
    """

    def __init__(self, folder: Path, transform: Callable[[Any], Any]) -> None:
        from PIL import Image  # noqa: PLC0415  # of those libraries alone that need it

        self.paths = [folder / f"{index:03}.png" for index in range(SAMPLES)]
        for index, path in enumerate(self.paths):
            Image.fromarray(picture(index)).save(path)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image  # noqa: PLC0415

        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB"))


def torchvision_v1(folder: Path, options: dict[str, Any]) -> Any:
    """``torchvision.transforms``: a Compose of five transforms, including the user's function."""
    from torchvision import transforms as T  # noqa: N812, PLC0415

    half = [0.5] * 3
    steps = [T.RandomResizedCrop(32), T.RandomHorizontalFlip(), sleeping_transform, T.ColorJitter(0.2)]
    whole = T.Compose([*steps, T.ToTensor(), T.Normalize(half, half)])
    return DataLoader(Pictures(folder, whole), BATCH, shuffle=True, **options)


def torchvision_v2(folder: Path, options: dict[str, Any]) -> Any:
    """``torchvision.transforms.v2``: a nested Compose, RandomApply, ToImage and ToDtype."""
    from torchvision.transforms import v2  # noqa: PLC0415

    inner = v2.Compose([v2.RandomResizedCrop(32), v2.RandomHorizontalFlip()])
    rest = [v2.RandomApply([v2.GaussianBlur(3)], p=0.5), v2.ToDtype(torch.float32, scale=True)]
    whole = v2.Compose([v2.ToImage(), inner, sleeping_transform, *rest])
    return DataLoader(Pictures(folder, whole), BATCH, shuffle=True, **options)


class Albumented:
    """Adapter for Albumentations, which take an array by name and return a dictionary.

    Args:
        whole: their ``Compose``.
    """

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __call__(self, image: Any) -> Any:
        return torch.from_numpy(self.whole(image=as_array(image))["image"].copy())


def albumentations(folder: Path, options: dict[str, Any]) -> Any:
    """``albumentations``: a Compose with OneOf, and with a Lambda around the user's function."""
    import albumentations as A  # noqa: N812, PLC0415

    one_of = A.OneOf([A.GaussianBlur(p=1), A.RandomBrightnessContrast(p=1)], p=0.9)
    ours = A.Lambda(image=sleeping_transform, p=1)
    whole = A.Compose([A.RandomCrop(32, 32), A.HorizontalFlip(), one_of, ours, A.Normalize()], seed=3)
    return DataLoader(Pictures(folder, Albumented(whole)), BATCH, shuffle=True, **options)


def monai(folder: Path, options: dict[str, Any]) -> Any:
    """``monai``: its Dataset, DataLoader and Compose of dictionary transforms and Lambdad."""
    from monai.data import DataLoader as MonaiLoader  # noqa: PLC0415
    from monai.data import Dataset as MonaiDataset  # noqa: PLC0415
    from monai.transforms import (  # noqa: PLC0415
        Compose,
        EnsureChannelFirstd,
        Lambdad,
        LoadImaged,
        RandFlipd,
        RandGaussianNoised,
        ScaleIntensityd,
    )

    for index in range(SAMPLES):
        np.save(folder / f"{index:03}.npy", picture(index))
    first = [LoadImaged("x"), EnsureChannelFirstd("x", channel_dim=-1), ScaleIntensityd("x")]
    last = [RandFlipd("x", prob=0.5), RandGaussianNoised("x", prob=0.5), Lambdad("x", sleeping_transform)]
    whole = Compose([*first, *last]).set_random_state(3)
    data = MonaiDataset([{"x": folder / f"{index:03}.npy"} for index in range(SAMPLES)], whole)
    return MonaiLoader(data, batch_size=BATCH, shuffle=True, **options)


def webdataset(folder: Path, options: dict[str, Any]) -> Any:
    """``webdataset``: shards, shuffle, decode, to_tuple, map_tuple and batched, in its WebLoader."""
    import webdataset as wds  # noqa: PLC0415

    for shard in range(4):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for index in range(shard, SAMPLES, 4):
                packed = io.BytesIO()
                np.save(packed, picture(index))
                member = tarfile.TarInfo(f"{index:03}.npy")
                member.size = packed.tell()
                packed.seek(0)
                tar.addfile(member, packed)
    urls = [str(folder / f"{shard}.tar") for shard in range(4)]
    data = wds.WebDataset(urls, shardshuffle=False, nodesplitter=wds.split_by_node, seed=3)
    data = data.shuffle(16, seed=3).decode().to_tuple("npy").map_tuple(sleeping_transform)
    return wds.WebLoader(data.batched(BATCH), batch_size=None, **options)


def transformed(folder: str) -> Any:
    """A StreamingDataset with the user's transform."""
    import litdata  # noqa: PLC0415

    return litdata.StreamingDataset(folder, transform=sleeping_transform, shuffle=True, seed=3)


def litdata_sample(index: int) -> dict[str, Any]:
    """Return one sample for litdata to store."""
    return {"index": index, "image": picture(index)}


def litdata(folder: Path, options: dict[str, Any]) -> Any:
    """``litdata``: an optimized folder, StreamingDataset with a transform, StreamingDataLoader."""
    import litdata as ld  # noqa: PLC0415

    made = folder / "optimized"
    ld.optimize(litdata_sample, list(range(SAMPLES)), str(made), num_workers=1, chunk_size=16)
    return ld.StreamingDataLoader(transformed(str(made)), batch_size=BATCH, **options)


def hf_transform(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Transform several rows at once, as ``with_transform`` calls it."""
    return {"image": [hf_image(row) for row in rows["image"]]}


def hf_image(row: Any) -> torch.Tensor:
    """Convert one row to a tensor."""
    return torch.tensor(sleeping_transform(row), dtype=torch.uint8)


def hf_datasets(folder: Path, options: dict[str, Any]) -> Any:
    """``datasets``: from_dict and with_transform; ``__getitems__`` requests a whole batch."""
    from datasets import Dataset as HFDataset  # noqa: PLC0415

    rows = HFDataset.from_dict({"image": [picture(index).tolist() for index in range(SAMPLES)]})
    rows.save_to_disk(str(folder / "saved"))
    data = HFDataset.load_from_disk(str(folder / "saved")).with_transform(hf_transform)
    return DataLoader(data, BATCH, shuffle=True, **options)


def hf_mapped(row: dict[str, Any]) -> dict[str, Any]:
    """Transform one row, as ``IterableDataset.map`` calls it."""
    return {"image": hf_image(row["image"])}


def hf_iterable(folder: Path, options: dict[str, Any]) -> Any:
    """``datasets``: to_iterable_dataset, shuffle and map, as an iterable dataset."""
    from datasets import Dataset as HFDataset  # noqa: PLC0415

    rows = HFDataset.from_dict({"image": [picture(index).tolist() for index in range(SAMPLES)]})
    data = rows.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=16).map(hf_mapped)
    return DataLoader(data, BATCH, **options)


CASES: Final[dict[str, tuple[str, str, Callable[[Path, dict[str, Any]], Any], tuple[str, ...]]]] = {
    "torchvision.transforms": (
        "torchvision",
        "torchvision",
        torchvision_v1,
        ("RandomResizedCrop", "RandomHorizontalFlip", "ColorJitter", "ToTensor", "Normalize"),
    ),
    "torchvision.transforms.v2": (
        "torchvision",
        "torchvision",
        torchvision_v2,
        ("ToImage", "RandomResizedCrop", "RandomHorizontalFlip", "RandomApply", "GaussianBlur", "ToDtype"),
    ),
    "albumentations": (
        "albumentations",
        "albumentations",
        albumentations,
        ("RandomCrop", "HorizontalFlip", "OneOf", "GaussianBlur", "RandomBrightnessContrast", "Normalize"),
    ),
    "monai": (
        "monai",
        "monai",
        monai,
        (
            "LoadImaged",
            "EnsureChannelFirstd",
            "ScaleIntensityd",
            "RandFlipd",
            "RandGaussianNoised",
            "Lambdad",
        ),
    ),
    "webdataset": ("webdataset", "webdataset", webdataset, ()),
    "litdata": ("litdata", "litdata", litdata, ()),
    "datasets, with_transform": ("datasets", "datasets", hf_datasets, ()),
    "datasets, iterable": ("datasets", "datasets", hf_iterable, ()),
}
"""Module, distribution, function that makes the loader, and the library's own transforms in it, by name."""


class Hashing(LightningModule):
    """A layer trained on the mean of a batch; it hashes its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.digest = hashlib.sha256()
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Hash all tensors and arrays of the batch, and the repr of everything else."""
        numbers = []
        for leaf in tree_leaves(batch):
            if isinstance(leaf, np.ndarray | torch.Tensor):
                array = np.ascontiguousarray(np.asarray(leaf))
                numbers.append(float(array.mean()))
                self.digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
            else:
                self.digest.update(str(leaf).encode())
        self.batches += 1
        return self.layer(torch.tensor([[sum(numbers)]])).square().mean()

    def configure_optimizers(self) -> Any:
        """Use SGD with tiny updates, because the loss doesn't matter."""
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def train(case: str, method: str, is_measured: bool, epochs: int) -> dict[str, Any]:
    """Run one fit in this process: hash and number of batches, and the callback's results if it's used."""
    from lightning_modelprof import ModelProfCallback  # noqa: PLC0415  # as a user who has none

    warnings.filterwarnings("ignore", message="(?!ModelProfCallback)")
    seed_everything(3, workers=True, verbose=False)
    options: dict[str, Any] = {"num_workers": WORKERS, "multiprocessing_context": method}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        callbacks = []
        if is_measured:
            callbacks = [ModelProfCallback(dirpath=folder / "out", skip_first=2, report={"terminal": False})]
        data = CASES[case][2](folder, options)
        model = Hashing()
        trainer = Trainer(
            accelerator="cpu",
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            default_root_dir=folder,
            max_epochs=epochs,
        )
        trainer.fit(model, data)
    found: dict[str, Any] = {"hash": model.digest.hexdigest(), "batches": model.batches}
    return found | (seen(callbacks[0]) if is_measured else {})


def seen(callback: Any) -> dict[str, Any]:
    """Return the callback's results on the workers, and the line that its first finding names."""
    loaders = callback.run.ranks[0].workers or ()
    findings = [one for one in callback.report.findings if one.status.value == "found"]
    findings.sort(key=lambda one: one.kind != "input_bound")  # a busy machine's finding may come first
    locations = [location for one in findings[:1] for location in one.locations]
    calls = [call for loader in loaders for call in loader.calls]
    return {
        "calls": [
            [
                call.name,
                call.kind,
                call.depth,
                None if call.total_ns is None else round(call.total_ns / 1e6, 2),
            ]
            for call in calls
        ],
        "notes": [note for loader in loaders for note in loader.notes],
        "workers": [[one.batches, one.samples, one.dropped] for loader in loaders for one in loader.workers],
        "verdict": findings[0].kind if findings else "",
        "places": list(places_of(locations[0])) if locations else [],
    }


def places_of(location: Any) -> Iterator[str]:
    """Yield ``file:line`` of a location, and of those inside it."""
    while location is not None:
        if location.file is not None:
            yield f"{Path(location.file).name}:{location.line}"
        location = location.inner or location.call


def in_a_process(case: str, method: str, is_measured: bool, epochs: int) -> dict[str, Any]:
    """Run :func:`train` in a separate process; ``{"error": ...}`` if it fails."""
    command = [
        sys.executable,
        __file__,
        "--one",
        case,
        method,
        str(int(is_measured)),
        "--epochs",
        str(epochs),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "",
        "NO_ALBUMENTATIONS_UPDATE": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"hash"')]
    if not lines:
        return {"error": (done.stderr.strip().splitlines() or ["nothing said"])[-1], "stderr": done.stderr}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def row(case: str, methods: list[str], epochs: int, is_verbose: bool) -> str:
    """Make a table row."""
    _, distribution, _, own = CASES[case]
    same, named, verdicts, calls = [], set(), {}, {}
    for method in methods:
        plain, measured = (in_a_process(case, method, is_measured, epochs) for is_measured in (False, True))
        if is_verbose:
            print(
                json.dumps({"case": case, "method": method, "plain": plain, "measured": measured}), flush=True
            )
        if "error" in plain or "error" in measured:
            same.append("both fail" if plain.get("error") == measured.get("error") else "NO, fails")
            continue
        if plain["hash"] == measured["hash"]:
            same.append("yes")
        else:
            again = in_a_process(case, method, False, epochs)
            same.append("NO" if again["hash"] == plain["hash"] else "differ without it, too")
        calls[method] = tuple(f"{call[0]} ({call[1]})" for call in measured["calls"])
        named |= {call[0].rsplit(".", 1)[-1] for call in measured["calls"]}
        right = f"{Path(__file__).name}:{SLEEPS_AT}"
        places = measured["places"]
        verdicts[method] = "the sleep" if right in places else (places[-1] if places else "none")
    cells = [
        case,
        version(distribution),
        ", ".join(methods),
        by_method(dict(zip(methods, same, strict=True))),
        f"{len(named & set(own))} of {len(own)}" if own else "-",
        by_method({method: ", ".join(dict.fromkeys(names)) for method, names in calls.items()}),
        by_method(verdicts),
    ]
    return "| " + " | ".join(cells) + " |"


def by_method(values: dict[str, str]) -> str:
    """Format a value that all start methods share, or one per method."""
    if len(set(values.values())) <= 1:
        return next(iter(values.values()), "-")
    return "; ".join(f"{method}: {value}" for method, value in values.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all without any")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="what was found in each fit, as JSON")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case, method, is_measured = options.one
        print("\n" + json.dumps(train(case, method, is_measured == "1", options.epochs)))
        return
    print("| library | version | workers start by | data are the same | its own transforms named |", end="")
    print(" calls seen | line of the verdict |\n|" + " --- |" * 7)
    wanted = [case for case in CASES if not options.cases or any(name in case for name in options.cases)]
    absent = [case for case in wanted if importlib.util.find_spec(CASES[case][0]) is None]
    for case in wanted:
        if case not in absent:
            print(row(case, options.methods, options.epochs, options.verbose), flush=True)
    for case in absent:
        print(f"\n{case} is not installed.")


if __name__ == "__main__":
    main()
