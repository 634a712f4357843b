"""What a host's waits for its device cost: how much earlier the device would be done without them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def stakes_of_waits(
    *,
    wait_end_ns: NDArray[np.int64],
    wait_ns: NDArray[np.int64],
    wait_step: NDArray[np.int64],
    launch_ns: NDArray[np.int64],
    gap_ns: NDArray[np.int64],
    gap_step: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """How much of each gap of a device is due to which of the host's waits before it.

    Derivation. Let W(k) be the time that the host waited before it launched event k, in all. Without waits it
    would have launched that event W(k) earlier. An event begins when the one before it is done and it has
    been launched. Where the device was idle for gap(k) before it because it was launched late, it could begin
    earlier by S(k) = min(S(k - 1) + gap(k), W(k)): by as much as the work before it is done earlier, and the
    gap, but no more than its launch comes earlier. Where there was no such gap, S(k) = S(k - 1). So
    each gap gives back the smaller one of its length and of W - S, the waits that have not been given back
    yet. A gap is put down to the latest such waits: they made it, those before them only lengthen it. What a
    wait has not given back by the end of the next step is forgotten: a host cannot be further ahead for long,
    and where each step waits, the next one has its own.

    Caveats:
        It holds for one host thread after the other and for one device that works in the order of launches.
        All waits are thought away together: of two in a row, the first of which waits for the device,
        removing the first alone only makes the second wait. What else the host waits for, how many launches
        fit into a queue, and that a value may be needed at once, is not looked at: it is the most that can
        be saved.

    Args:
        wait_end_ns: end of each wait, shape (w,), sorted.
        wait_ns: length of each wait that no other wait covers, shape (w,).
        wait_step: number of the step of each wait, shape (w,), sorted.
        launch_ns: launch of the event that ends each gap, shape (g,), sorted.
        gap_ns: length of each gap, shape (g,).
        gap_step: number of the step of each gap, shape (g,).

    Returns:
        Index of the wait, index of the gap and time, one entry for each pair that shares time.
    """
    waits: list[int] = []
    gaps: list[int] = []
    times: list[int] = []
    left: list[tuple[int, int]] = []  # waits whose time has not been given back, the latest one last
    ends, lengths = wait_end_ns.tolist(), wait_ns.tolist()
    following = 0
    steps = wait_step.tolist()
    for gap, (launched, idle, step) in enumerate(
        zip(launch_ns.tolist(), gap_ns.tolist(), gap_step.tolist(), strict=True)
    ):
        while following < len(ends) and ends[following] <= launched:
            left.append((following, lengths[following]))
            following += 1
        rest = idle
        while rest > 0 and left:
            wait, available = left.pop()
            if steps[wait] < step - 1:
                left.clear()  # those before it are older still
                break
            time = min(rest, available)
            rest -= time
            if time:
                waits.append(wait)
                gaps.append(gap)
                times.append(time)
            if time < available:
                left.append((wait, available - time))
    return np.array(waits, np.int64), np.array(gaps, np.int64), np.array(times, np.int64)
