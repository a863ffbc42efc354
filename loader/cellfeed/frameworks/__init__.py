"""Data modules for the frameworks that train: each is a module of its own, imported by name."""

__all__: list[str] = []
