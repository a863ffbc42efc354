"""Files whose tables are cached, and what is done again."""

import os
import time

from cellfeed.bytes import _location


def note_calls(monkeypatch, owner, name, note):
    """Call `note` with each call of a function."""
    function = getattr(owner, name)

    def noted(*arguments, **options):
        note()
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, noted)


def settle(monkeypatch):
    """Cache tables of a file at once, as if ten seconds had passed since it was written."""
    monkeypatch.setattr(_location, "_SETTLED_NS", -1)


def age(path, seconds=1000):
    """Let files have been modified long ago."""
    then = time.time() - seconds
    for file in [path, *path.rglob("*")]:
        os.utime(file, (then, then))
