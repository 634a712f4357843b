"""Does the host wait while it copies to the device, and the device then for the host?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.trace.host_waits import HostWait
from lightning_modelprof.report.advice.owners import owner_of_loader
from lightning_modelprof.report.rules.device import Circumstances
from lightning_modelprof.report.rules.wait_findings import WaitRule
from lightning_modelprof.run.sites import BATCH_START, HOST_TO_DEVICE, SourceSite

_TRANSFER: Final = "transfer"
_FOR_BATCHES: Final = (
    "{call}: copies of the batch from pageable memory block the host; from pinned memory"
    " Lightning does not wait for them."
)
_FOR_OTHERS: Final = (
    "Make the tensor on the device (device=self.device), or once: register_buffer in __init__. What must be"
    " copied each time goes from pinned memory with non_blocking=True."
)
_FOR_EITHER: Final = (
    "If this is the batch: {call} and .to(device, non_blocking=True). If it is made in"
    " the step: make it on the device, or once."
)


@dataclass(frozen=True, kw_only=True)
class HostToDeviceCopy(WaitRule):
    """Blocking copies to the device: of the batch, and of what the step makes on the host.

    From pageable memory the host copies into memory of the driver itself, after the work that was queued
    before is done; then the queue is empty.
    """

    kind: ClassVar[str] = "host_to_device_copy"
    title: ClassVar[str] = "Copies to the device block the host"
    site_kinds: ClassVar[tuple[str, ...]] = (HOST_TO_DEVICE,)
    verb: ClassVar[str] = "copy to the device and block the host meanwhile"

    def is_asked(self, wait: HostWait) -> bool:
        """Copies to the device."""
        return wait.place.kind == "host_to_device"

    def advice(
        self, waits: Sequence[HostWait], sites: Sequence[SourceSite], circumstances: Circumstances
    ) -> str:
        """For the batch, for other tensors, or for both."""
        if not circumstances.is_run and not any(wait.place.phase == _TRANSFER for wait in waits):
            return _FOR_EITHER.format(call=_call(circumstances))
        of_batch = [wait.place.phase == _TRANSFER for wait in waits]
        of_batch += [site.phase == BATCH_START for site in sites if not waits]
        chosen = [_FOR_BATCHES.format(call=_call(circumstances))] if any(of_batch) else []
        if not all(of_batch):
            chosen.append(_FOR_OTHERS)
        return " ".join(chosen) or _FOR_OTHERS


def _call(circumstances: Circumstances) -> str:
    """What pins the memory of batches."""
    setup = circumstances.setup
    owner = owner_of_loader(setup, setup.loaders[0]) if setup is not None and setup.loaders else None
    return "DataLoader(pin_memory=True)" if owner is None else owner.loader("DataLoader", pin_memory=True)
