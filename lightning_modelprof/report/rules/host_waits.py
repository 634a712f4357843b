"""Does the host wait for values of the device, and the device then for the host?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.trace.host_waits import HostWait
from lightning_modelprof.report.rules.device import Circumstances
from lightning_modelprof.report.rules.wait_findings import WaitRule
from lightning_modelprof.report.rules.wait_spots import is_lightnings_own
from lightning_modelprof.run.sites import DEVICE_TO_HOST, PRINT, SYNCHRONISATION, SourceSite

_VALUE: Final = frozenset(("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"))
_INDEXING: Final = ("aten::nonzero", "aten::argwhere", "aten::index", "aten::index_put_")
_SELECTING: Final = ("aten::masked_select", "aten::repeat_interleave", "aten::bincount")
_UNIQUE: Final = ("aten::_unique2", "aten::unique_consecutive", "aten::unique_dim")
_SIZE: Final = frozenset((*_INDEXING, *_SELECTING, *_UNIQUE))
_COPY: Final = frozenset(("aten::to", "aten::_to_copy", "aten::copy_"))

_FOR_LIGHTNING: Final = (
    "Lightning itself reads values here: log less often (Trainer(log_every_n_steps=...)), and"
    " self.log(..., prog_bar=False) for what need not be in the progress bar."
)
_FOR_VALUES: Final = (
    "Keep the value a tensor: add it up on the device and read it every n steps, write the condition with"
    " torch.where, check with torch._assert_async, or check on the host before the copy."
)
_FOR_SIZES: Final = (
    "The size of the result depends on values: use torch.where or masked operations of fixed shape instead of"
    " nonzero, boolean indexing, masked_select or unique."
)
_FOR_COPIES: Final = (
    "Copy to the host every n steps, or with non_blocking=True into pinned memory that is read in the next"
    " step."
)
_FOR_PRINTS: Final = "Print every n steps: a tensor's text needs its values."
_FOR_CALLS: Final = (
    "Remove the synchronization (torch.cuda.synchronize, event.synchronize), or do it every n steps: timing"
    " by events does not need it."
)


@dataclass(frozen=True, kw_only=True)
class HostDeviceSync(WaitRule):
    """The host reads values of the device, or synchronizes."""

    kind: ClassVar[str] = "host_device_sync"
    title: ClassVar[str] = "The host waits for values of the device"
    site_kinds: ClassVar[tuple[str, ...]] = (SYNCHRONISATION, DEVICE_TO_HOST)
    verb: ClassVar[str] = "wait until the device is done"

    def is_asked(self, wait: HostWait) -> bool:
        """All but copies to the device."""
        return wait.place.kind != "host_to_device"

    def advice(
        self,
        waits: Sequence[HostWait],
        sites: Sequence[SourceSite],
        circumstances: Circumstances,  # noqa: ARG002  # of the other rule
    ) -> str:
        """By what the operators are for."""
        operators = {name for wait in waits for name in wait.place.operators}
        operators |= {site.operator for site in sites}
        if is_lightnings_own(sites):
            return _FOR_LIGHTNING
        has_bare_calls = any(not wait.place.operators for wait in waits)
        chosen = [
            text
            for text, applies in (
                (_FOR_SIZES, operators & _SIZE),
                (_FOR_VALUES, operators & _VALUE),
                (_FOR_COPIES, operators & _COPY and not operators & _VALUE),
                (_FOR_PRINTS, PRINT in operators),
                (_FOR_CALLS, has_bare_calls),
            )
            if applies
        ]
        return " ".join(chosen) or _FOR_VALUES
