"""Files whose tables are cached, and what is done again."""

import os
import time


def note_calls(monkeypatch, owner, name, note):
    """Call `note` with each call of a function."""
    function = getattr(owner, name)

    def noted(*arguments, **options):
        note()
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, noted)


def age(path, seconds=1000):
    """Let files have changed long ago, for what has just changed is not cached."""
    then = time.time() - seconds
    for file in [path, *path.rglob("*")]:
        os.utime(file, (then, then))
