"""Files whose tables are cached."""

import os
import time


def age(path, seconds=1000):
    """Let files have changed long ago, for what has just changed is not cached."""
    then = time.time() - seconds
    for file in [path, *path.rglob("*")]:
        os.utime(file, (then, then))
