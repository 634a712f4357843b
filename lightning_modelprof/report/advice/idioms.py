"""What to write in place of a call that is known to be slow, where it takes the time.

The line is read from its file. A file that has changed since the run began is not read.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

from lightning_modelprof.report.model import Finding, Location, Status


class Idiom(NamedTuple):
    """A pattern in a line of source, and what to do there."""

    pattern: re.Pattern[str]
    advice: str


def _idiom(pattern: str, advice: str) -> Idiom:
    return Idiom(re.compile(pattern), advice)


IDIOMS: Final = (
    _idiom(
        r"\b(iterrows|itertuples)\(|\.apply\(.*(axis=1|lambda)|np\.vectorize",
        "A DataFrame's rows one by one are slow: work on whole columns, or on .to_numpy() once.",
    ),
    _idiom(
        r"\b(read_csv|read_parquet|read_json|read_pickle|h5py\.File|netCDF4\.Dataset)\(",
        "Read the file once, in __init__, and keep what was read.",
    ),
    _idiom(
        r"\bnp\.load\(|\btorch\.load\(|\bjson\.load\(|\bpickle\.load\(|\bnib\.load\(",
        "Load it once, in __init__, and keep it; np.load(mmap_mode='r') reads only the rows asked for.",
    ),
    _idiom(
        r"\.choice\(.*\bp=|\bmultinomial\(.*\b1\b",
        "A draw with weights goes through all of them: draw many at once (size=n, num_samples=n).",
    ),
    _idiom(
        r"\b(roc_auc_score|average_precision_score|confusion_matrix|f1_score|silhouette_score|TSNE|UMAP|PCA)\(",
        "Compute it once an epoch, not in each step.",
    ),
    _idiom(
        r"\b(svd|svdvals|svd_lowrank|eig|eigh|eigvals|eigvalsh|pinv|matrix_rank|matrix_exp)\(|ord=2\b",
        "Decompositions of matrices are expensive: do it every some steps, or without one.",
    ),
    _idiom(
        r"\bdeepcopy\(",
        "Copy only what will change (.clone() of a few tensors), into memory that is there (copy_), and less"
        " often.",
    ),
    _idiom(
        r"\b(to_csv|to_parquet|savefig|imsave|json\.dump|pickle\.dump|torch\.save|np\.save|savez)\b",
        "Write once an epoch, or only what is new.",
    ),
    _idiom(
        r"\bnp\.append\(|\bnp\.concatenate\(|\btorch\.cat\(|\bpd\.concat\(|\bnp\.v?stack\(",
        "Joining copies all of it: keep running sums, or collect in a list and join once.",
    ),
    _idiom(r"\.tolist\(\)", "Keep tensors or arrays: .tolist() makes a Python object of each number."),
    _idiom(
        r"\b(torch\.(tensor|as_tensor)|(Float|Double|Long|Int)Tensor)\(",
        "A tensor of a list is slow, as its numbers are converted one by one: compute with NumPy arrays, and"
        " pass one array to torch.from_numpy (np.stack makes one of several).",
    ),
    _idiom(
        r"\.(index|count)\(|\bnot in self\.\w+|\bif \w+ in self\.\w+",
        "Looking through a list takes longer the longer it is: a dict or a set answers at once.",
    ),
    _idiom(
        r"\b\w*(df|frame|ratings|table|events|rows)\w*\[.*==|\.loc\[|\.query\(|\.isin\(",
        "Filtering goes through all rows: group them once (dict(tuple(df.groupby(key)))) and look up.",
    ),
    _idiom(r"\bsorted\(|\.sort\(|\bargsort\(", "Sort once and keep the order."),
)
"""In the order in which they are tried: the first that fits is said."""


def idiom_advice(line: str) -> str:
    """What to do at a line of source; ``""`` where nothing is known of what stands there."""
    code = line.partition("#")[0]
    return next((one.advice for one in IDIOMS if one.pattern.search(code)), "")


def with_idiom(finding: Finding, created: str) -> Finding:
    """The same finding, what is known of a call at its lines first in its action.

    Args:
        finding: whose places take the time.
        created: when the run began, ISO 8601.
    """
    if finding.status is not Status.FOUND:
        return finding
    for place in finding.locations[:2]:
        for one in _inwards(place):
            advice = _line_advice(one, created)
            if advice and advice not in finding.action:
                return replace(finding, action=f"{advice} {finding.action}")
    return finding


def _inwards(place: Location) -> Iterator[Location]:
    """The innermost line first."""
    if place.inner is not None:
        yield from _inwards(place.inner)
    if place.is_exact:
        yield place


def _line_advice(place: Location, created: str) -> str:
    if place.file is None or place.line is None or place.package:
        return ""
    try:
        is_cell = place.file in linecache.cache and not Path(place.file).exists()
        if not is_cell and Path(place.file).stat().st_mtime > datetime.fromisoformat(created).timestamp():
            return ""
    except (OSError, ValueError):
        return ""
    return idiom_advice(linecache.getline(place.file, place.line))
