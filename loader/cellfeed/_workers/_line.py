"""The connection on which workers announce shared memory, by its descriptor."""

import os
import socket
import struct
from multiprocessing.connection import Connection
from typing import NamedTuple

__all__ = ["ANNOUNCED", "Lent", "as_socket", "can_lend", "connected"]

ANNOUNCED = struct.Struct("4q")
"""Worker, number of the segment, size of a piece in bytes, and number of pieces."""


class Lent(NamedTuple):
    """A piece of shared memory, as messages refer to it."""

    worker: int
    segment: int
    piece: int


def can_lend() -> bool:
    """Whether the system has memory that can be passed to another process by descriptor."""
    return hasattr(os, "memfd_create")


def connected() -> tuple[Connection, Connection]:
    """Return the receiving and the sending end of a connection for segments."""
    receiving, sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # They close with the last reference, and can be pickled for a process that starts.
    return Connection(receiving.detach()), Connection(sending.detach())


def as_socket(connection: Connection) -> socket.socket:
    """Return a non-blocking socket of the same connection, to be closed."""
    line = socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(0)
    return line
