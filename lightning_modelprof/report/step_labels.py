"""What the categories of the step time breakdown are called."""

from __future__ import annotations

from typing import Final

STEP_LABELS: Final = {
    "kernel": "Kernel",
    "memcpy": "Memcpy",
    "memset": "Memset",
    "communication": "Communication",
    "runtime": "Runtime",
    "dataloader": "DataLoader",
    "cpu_exec": "CPU Exec",
    "other": "Other",
}
"""By keys of ``STEP_CATEGORIES``; the removed TensorBoard plugin's own words."""
