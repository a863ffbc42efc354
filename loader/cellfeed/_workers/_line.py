"""The line on which workers announce shared memory, by its descriptor."""

import os
import socket
import struct
from multiprocessing.connection import Connection
from typing import NamedTuple

__all__ = ["ANNOUNCED", "Lent", "as_socket", "can_lend", "connected"]

ANNOUNCED = struct.Struct("4q")
"""Worker, number of the segment, size of a piece in bytes, and number of pieces."""


class Lent(NamedTuple):
    """A piece of shared memory, as a message names it."""

    worker: int
    segment: int
    piece: int


def can_lend() -> bool:
    """Whether the system has memory that another process is given by its descriptor."""
    return hasattr(os, "memfd_create")


def connected() -> tuple[Connection, Connection]:
    """Return where segments are received, and where they are sent."""
    receiving, sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Which are closed with the last reference, and can be pickled for a process that starts.
    return Connection(receiving.detach()), Connection(sending.detach())


def as_socket(connection: Connection) -> socket.socket:
    """Return a socket of the same line that waits for nothing, to be closed."""
    line = socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(0)
    return line
