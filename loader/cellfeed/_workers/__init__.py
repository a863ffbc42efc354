"""Delivering minibatches from worker processes: in shared memory, which is reused."""

from cellfeed._workers._arrivals import Arrivals
from cellfeed._workers._departures import Departures, WorkerStart, departures, pool_of_minibatches
from cellfeed._workers._line import can_lend, connected
from cellfeed._workers._messages import message_of

__all__ = [
    "Arrivals",
    "Departures",
    "WorkerStart",
    "can_lend",
    "connected",
    "departures",
    "message_of",
    "pool_of_minibatches",
]
