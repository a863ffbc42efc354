"""A plugin of pytest for `make coverage`: processes that tests fork start at once.

In each of them, coverage notes for its own debugging who started it. `inspect.stack` looks through
all modules for that, which takes from seconds to a minute with those that tests import.
"""


def pytest_configure():
    from coverage import collector  # noqa: PLC0415 - not where tests of docstrings are collected

    vars(collector)["short_stack"] = lambda: ""
