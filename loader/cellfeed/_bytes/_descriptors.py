"""File descriptors that are closed without a destructor in Python.

Ctrl-C that arrived in one would be printed and forgotten, and the descriptor left open.
"""

import select

__all__ = ["closed_with"]


def closed_with(descriptor: int) -> object:
    """Return an object that closes a file descriptor when nobody refers to it any more.

    It is the one object of the standard library that takes any descriptor and closes it
    silently, in C; nothing is asked of it.
    """
    queue = "epoll" if hasattr(select, "epoll") else "kqueue"  # Linux, and BSD with macOS
    closing: object = getattr(select, queue).fromfd(descriptor)
    return closing
