"""Replacements for calls known to be slow, at lines where they take most of the time.

Lines are read from their files, except files that changed since the run started.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.source import source_line
from lightning_modelprof.report.model import Finding, Status


class Idiom(NamedTuple):
    """A pattern in a source line, the advice for it, and what must run below the line.

    ``below`` is a package that most of the line's time must be in, ``""`` for none at all, as for C
    functions, or ``None`` if it doesn't matter.
    """

    pattern: re.Pattern[str]
    advice: str
    below: str | None


def _idiom(pattern: str, advice: str, below: str | None = None) -> Idiom:
    return Idiom(re.compile(pattern), advice, below)


_JOINED: Final = r"(np\.append|np\.concatenate|np\.[vh]?stack|torch\.cat|torch\.stack|pd\.concat)"

IDIOMS: Final = (
    _idiom(
        r"\bgc\.collect\(|\bempty_cache\(",
        "Call gc.collect() and empty_cache() at most once per epoch.",
    ),
    _idiom(
        r"\b(iterrows|itertuples)\(|\.apply\(.*axis=1|np\.vectorize",
        "Work on whole columns, or on one .to_numpy() array.",
    ),
    _idiom(
        r"\.apply\(.*lambda",
        "Work on whole columns instead of .apply(), which calls Python per value.",
        below="pandas",
    ),
    _idiom(
        r"\.i?loc\[\s*(?!\w*mask)(int\()?[\w.]+\)?\s*(,\s*[^\]=<>&|]*)?\]|\.i?at\[",
        "Convert the columns once in __init__ (.to_numpy(), .tolist()) and index those.",
        below="pandas",
    ),
    _idiom(
        r"\b(read_csv|read_parquet|read_json|read_pickle|h5py\.File|netCDF4\.Dataset)\(",
        "Read the file once, in __init__.",
    ),
    _idiom(
        r"\bnp\.load\(|\btorch\.load\(|\bjson\.load\(|\bpickle\.load\(|\bnib\.load\(",
        "Load it once, in __init__, or use np.load(mmap_mode='r').",
    ),
    _idiom(
        r"\.choice\(.*\bp=|\bmultinomial\(.*\b1\b",
        "Draw many values per call (size=n, num_samples=n).",
    ),
    _idiom(
        r"\b(roc_auc_score|average_precision_score|confusion_matrix|f1_score|silhouette_score|TSNE|UMAP|PCA)\(",
        "Compute it once per epoch.",
    ),
    _idiom(
        r"\b(svd|svdvals|svd_lowrank|eig|eigh|eigvals|eigvalsh|pinv|matrix_rank|matrix_exp)\(|ord=2\b",
        "Decompose the matrix every N steps, or avoid it.",
    ),
    _idiom(
        r"\bdeepcopy\(",
        "Copy only changed tensors, with .clone() or into existing memory (copy_).",
    ),
    _idiom(
        r"\b(to_csv|to_parquet|savefig|imsave|json\.dump|pickle\.dump|torch\.save|np\.save|savez)\b",
        "Write once per epoch, or only new rows.",
    ),
    _idiom(
        rf"(?P<grown>self(\.\w+)+(\[\w+\])?)\s*=\s*{_JOINED}\(.*(?P=grown)(?!\w)",
        "Keep running sums, or collect a list and join it once.",
    ),
    _idiom(
        r"\.tolist\(\)",
        "Keep tensors or arrays instead of calling .tolist().",
        below="",
    ),
    _idiom(
        r"\b(torch\.(tensor|as_tensor)|(Float|Double|Long|Int)Tensor)\(\s*([\w.]+(\[[^()]*\])?|\[[^()]*)\s*[,)]",
        "Build one NumPy array and pass it to torch.from_numpy, not a list.",
        below="",
    ),
    _idiom(
        r"\.(index|count)\(|\bnot in self\.\w+|\bif \w+ in self\.\w+",
        "Look it up in a dict or a set, not a list.",
        below="",
    ),
    _idiom(
        r"\b\w*(df|frame|ratings|table|events|rows)\w*\[.*==|\.loc\[|\.query\(|\.isin\(",
        "Group the rows once with dict(tuple(df.groupby(key))), then look them up.",
    ),
    _idiom(
        r"\bsorted\(self\.|\bself\.[\w.]+\.(sort|argsort)\(|\bargsort\(self\.",
        "Sort once and keep the order.",
    ),
)
"""In order of precedence: the first match wins."""


class _LineTime(NamedTuple):
    """A line's sampled time, and the part of it as the innermost user line.

    ``below`` maps packages to the time they ran below it then; ``""`` is the line itself.
    """

    whole_ns: int
    own_ns: int
    samples: int
    below: Mapping[str, int]


def idiom_advice(line: str, below: Collection[str] | None = None) -> str:
    """Return the advice for a source line; ``""`` if it has no known call.

    Args:
        below: packages that most of its time is in, ``""`` for the line itself; ``None`` if it doesn't
            matter.
    """
    code = line.partition("#")[0]
    fits = (one for one in IDIOMS if below is None or one.below is None or one.below in below)
    return next((one.advice for one in fits if one.pattern.search(code)), "")


def with_idiom(finding: Finding, created: str, *sampled: HotLines | None) -> Finding:
    """Put the advice for a known call at the slowest line first in the finding's action."""
    if finding.status is not Status.FOUND:
        return finding
    lines = [hot for hot in sampled if hot is not None]
    places = [one for place in finding.locations[:2] for one in _inwards(place)]
    timed = [(place, _time_at(place, lines)) for place in places]
    place, taken = max(timed, key=lambda one: one[1].own_ns, default=(None, _NO_TIME))
    if place is None or taken.samples < _LEAST_SAMPLES or 2 * taken.own_ns < taken.whole_ns:
        return finding
    below = [name for name, time_ns in taken.below.items() if 2 * time_ns >= taken.own_ns]
    advice = _line_advice(place, created, below)
    known = not advice or advice in finding.action
    return finding if known else replace(finding, action=f"{advice} {finding.action}")


_LEAST_SAMPLES: Final = 3
_NO_TIME: Final = _LineTime(0, 0, 0, {})


def _inwards(place: Place) -> Iterator[Place]:
    if place.inner is not None:
        yield from _inwards(place.inner)
    yield place


def _time_at(place: Place, sampled: Sequence[HotLines]) -> _LineTime:
    if not place.is_exact:
        return _NO_TIME
    whole_ns = own_ns = samples = 0
    below: Counter[str] = Counter()
    for hot in sampled:
        for stack in hot.samples.stacks:
            frames = [hot.samples.frames[number] for number in stack.frames]
            at = [
                number
                for number, one in enumerate(frames)
                if one.is_users and (one.file, one.line) == (place.file, place.line)
            ]
            if not at:
                continue
            whole_ns += stack.time_ns
            inner = frames[at[-1] + 1 :]
            if not any(one.is_users for one in inner):
                own_ns, samples = own_ns + stack.time_ns, samples + stack.samples
                below.update(
                    dict.fromkeys(
                        {one.python_module.partition(".")[0] for one in inner} or {""}, stack.time_ns
                    )
                )
    return _LineTime(whole_ns, own_ns, samples, below)


def _line_advice(place: Place, created: str, below: Collection[str]) -> str:
    if place.file is None or place.line is None or place.package:
        return ""
    return idiom_advice(source_line(place.file, place.line, created), below)
