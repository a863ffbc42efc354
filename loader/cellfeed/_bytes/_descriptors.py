"""File descriptors that are closed without a destructor in Python.

If Ctrl-C arrived in one, it would be printed and ignored, and the descriptor would stay open.
"""

import select

__all__ = ["closed_with"]


def closed_with(descriptor: int) -> object:
    """Return an object that closes a file descriptor when nothing refers to it any longer.

    It is the only object of the standard library that takes any descriptor and closes it
    silently, in C; it has no other use here.
    """
    queue = "epoll" if hasattr(select, "epoll") else "kqueue"  # Linux, and BSD with macOS
    closing: object = getattr(select, queue).fromfd(descriptor)
    return closing
