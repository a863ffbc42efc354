"""Settings of every test."""

from hypothesis import settings

# A shared machine may be slow at any moment; how long a test takes says nothing about the code.
settings.register_profile("cellfeed", deadline=None)
settings.load_profile("cellfeed")
