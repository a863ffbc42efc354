"""The table of storages in docs/reference/opening.md, generated from the registry.

``python -m cellfeed._storages._table docs/reference/opening.md`` updates it in a page.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from cellfeed._storages._base import Storage, StorageFacts, built_in

_BEGIN, _END = "<!-- the registry's -->\n", "<!-- end -->"
_HEAD = (
    "storage", "recognised by", "rows", "threads", "remote", "labels", "resume", "to install",
)  # fmt: skip
_NOTHING_SAID = StorageFacts(recognized="", reading="", threads="", remote="", labels="")


def table_of_storages(storages: Iterable[Storage]) -> str:
    """Return a table in Markdown with a row for each storage."""
    rows = [_HEAD, ("---",) * len(_HEAD), *map(_row, storages)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table(page: str) -> str:
    """Return a page with its table replaced by that of the registered storages."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{table_of_storages(built_in())}{_END}{after}"


def _row(storage: Storage) -> tuple[str, ...]:
    facts = storage.facts or _NOTHING_SAID
    extra = f"`cellfeed[{storage.extra}]`" if storage.extra else "nothing"
    # Where a run was left is a matter of the plan, which knows no storage.
    columns = facts.recognized, facts.reading, facts.threads, facts.remote, facts.labels, "exact"
    return (f"**{storage.name}**", *columns, extra)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_table(page.read_text()))
