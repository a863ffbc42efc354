"""A plugin of pytest for `make coverage`: processes that tests fork start at once.

In each of them, coverage notes for its own debugging who started it. `inspect.stack` looks through
all modules for that, which takes from seconds to a minute with those that tests import.
"""

from coverage import collector

collector.short_stack = lambda: ""
