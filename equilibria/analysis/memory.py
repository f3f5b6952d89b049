"""Peak memory of a function call, as counted by torch's allocator."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_memory(work: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Return the bytes that `work()` holds at its peak, above what was allocated before.

    On the CPU torch's profiler counts every block, which makes the work slightly slower. Run the work once before, so that
    caches it keeps are already allocated.
    """
    if torch.device(device).type == "cuda":
        return _peak_on_cuda(work, torch.device(device))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs its start and end
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    now = peak = 0
    events = (event for event in found.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _peak_on_cuda(work: Callable[[], Any], device: torch.device) -> int:
    """Return the growth of the peak of allocated CUDA memory during `work()`."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before
