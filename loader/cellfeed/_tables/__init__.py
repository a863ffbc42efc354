"""Which tables are kept from one opening to the next: where rows and chunks lie in large files."""

from cellfeed._tables._kept import KeptTables, Tables

__all__ = ["KeptTables", "Tables"]
