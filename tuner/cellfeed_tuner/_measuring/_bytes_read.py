"""What a process and its workers have read, by the counters that the kernel keeps of them."""

import multiprocessing
from dataclasses import dataclass

import psutil

__all__ = ["BytesRead", "bytes_read"]


@dataclass(frozen=True, slots=True)
class BytesRead:
    """Bytes asked of the system, and those that it fetched from storage, where it reads ahead."""

    asked: float
    from_storage: float

    def __sub__(self, earlier: "BytesRead") -> "BytesRead":
        return BytesRead(self.asked - earlier.asked, self.from_storage - earlier.from_storage)


def bytes_read() -> BytesRead | None:
    """Return what this process and its workers have read so far; None where that is not counted.

    The kernel adds what a worker has read to its parent when it has ended.
    """
    asked = from_storage = 0
    for pid in [None, *(worker.pid for worker in multiprocessing.active_children())]:
        try:
            counters = psutil.Process(pid).io_counters()
            asked += counters.read_chars
            from_storage += counters.read_bytes
        except (AttributeError, NotImplementedError, OSError, psutil.Error):
            return None
    return BytesRead(asked, from_storage)
