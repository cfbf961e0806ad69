"""The clock of leases: it runs on while the machine sleeps, and nobody can set it."""

import time


def boottime_us() -> int:
    """CLOCK_BOOTTIME in microseconds. For differences on this machine alone."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
