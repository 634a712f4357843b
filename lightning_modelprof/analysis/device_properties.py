"""Device properties: what a trace says of the devices' models, and what their names tell."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Final

from lightning_modelprof.trace.model import Trace

_WITHOUT_TENSOR_CORES: Final = re.compile(
    r"\b(?:AMD|ATI|Radeon|Instinct|MI\d+\w*|gfx\w+|Intel|XPU|MTIA|Gaudi|GTX 16\d\d\w*|MX\d{3})\b", re.I
)
"""In the names of other makers' devices, and of NVIDIA's small ones of newer generations."""

_FIRST_WITH_TENSOR_CORES: Final = 7
"""Major number of the compute capability: Volta's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """What the file says of a device.

    Attributes:
        name: of the model; ``None`` if the file does not say.
        memory_bytes: in total; ``None`` if the file does not say.
        compute_capability: such as ``8.0``; ``None`` if the file does not say.
    """

    name: str | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None

    @property
    def lacks_tensor_cores(self) -> bool:
        """Whether it is known to have none: of another maker than NVIDIA, or of a model without."""
        if self.name is not None and _WITHOUT_TENSOR_CORES.search(self.name):
            return True
        major = (self.compute_capability or "").partition(".")[0]
        return major.isdecimal() and int(major) < _FIRST_WITH_TENSOR_CORES


def device_properties(trace: Trace) -> dict[int, DeviceProperties]:
    """What the file says of each device, by its number; nothing from what cannot be understood.

    ``deviceProperties`` is a list, or its text in JSON or Python, as some tools save it.
    """
    written = trace.metadata.get("deviceProperties")
    entries = _from_text(written) if isinstance(written, str) else written
    found: dict[int, DeviceProperties] = {}
    for entry in entries if isinstance(entries, list) else []:
        number = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(number, int):
            continue
        name = entry.get("name")
        major, minor = whole(entry.get("computeMajor")), whole(entry.get("computeMinor"))
        memory_bytes = whole(entry.get("totalGlobalMem"))
        found[number] = DeviceProperties(
            name=name if isinstance(name, str) and name else None,
            memory_bytes=memory_bytes or None,
            compute_capability=None if major is None or minor is None else f"{major}.{minor}",
        )
    return found


def amount(value: object) -> int | float | None:
    """The value if it is a number that can be an amount: anybody may have edited the file."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 0 <= value < 2**63 else None


def whole(value: object) -> int | None:
    """The value if it is a whole number that can be an amount."""
    number = amount(value)
    return number if isinstance(number, int) else None


def _from_text(text: str) -> object:
    """The value of a text in JSON or Python, ``None`` when it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
