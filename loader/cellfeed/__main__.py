"""``python -m cellfeed``: the ``cellfeed`` command."""

from cellfeed._entry_point import main

main()
