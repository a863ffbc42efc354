"""Tables cached between openings: where rows and chunks lie in large files."""

from cellfeed._tables._kept import KeptTables, Tables

__all__ = ["KeptTables", "Tables"]
