"""A folder of files with the same columns, as one table: its files are read one after the other, by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from latedrop.cli.tables.rows import Block, Columns, Table
from latedrop.errors import DataError
from latedrop.terminal import listed

__all__ = ["open_folder"]

_SHOWN = 4


def open_folder(path: str, openers: Mapping[str, Callable[[str], Table]]) -> Table:
    """The files of a folder whose endings are among those of `openers`, all of one kind, in the order of their names.

    Files that start with a dot or an underscore, such as `_SUCCESS`, are left out, and so are those of other endings.
    Places are `file:place`.
    """
    files, opener = _files(path, openers)
    tables = (opener(str(file)) for file in files)  # looked at one by one: a thousand open files are too many
    first = next(tables)
    counts = [first.count]
    for file, other in zip(files[1:], tables, strict=True):
        _check_same(path, files[0].name, first, file.name, other)
        counts.append(other.count)

    def read(columns: Columns, size: int) -> Iterator[Block]:
        for file in files:
            for places, numbers, kept in opener(str(file)).read(columns, size):
                yield [f"{file.name}:{place}" for place in places], numbers, kept

    known = [count for count in counts if count is not None]
    count = sum(known) if len(known) == len(counts) else None
    return Table(path, first.names, first.arrays, count, first.unit, read)


def _files(path: str, openers: Mapping[str, Callable[[str], Table]]) -> tuple[list[Path], Callable[[str], Table]]:
    found: dict[Path, Callable[[str], Table]] = {}
    inside = []
    for entry in sorted(Path(path).iterdir()):
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir():
            inside.append(entry.name)
        opener = next((openers[end] for end in openers if entry.name.lower().endswith(end)), None)
        if opener is not None and entry.is_file():
            found[entry] = opener
    if inside:
        raise DataError(
            f"expected files side by side in the folder {path}; found folders in it: {listed(inside, _SHOWN)}. Name "
            "one of them, or put the files side by side."
        )
    if not found:
        raise DataError(f"expected files that end in {', '.join(openers)} in the folder {path}; found none.")
    kinds = {opener: file.name for file, opener in reversed(found.items())}
    if len(kinds) > 1:
        raise DataError(
            f"expected files of one kind in the folder {path}; found {listed(sorted(kinds.values()), _SHOWN)}. Put "
            "each kind into a folder of its own."
        )
    return list(found), next(iter(kinds))


def _check_same(path: str, first: str, table: Table, name: str, other: Table) -> None:
    """Raise where the second file lacks names of the first, or has others; their order does not matter."""
    missing = [column for column in table.names if column not in other.names]
    more = [column for column in other.names if column not in table.names]
    if missing or more:
        parts = [f"lacks {listed(map(repr, missing), _SHOWN)}"] if missing else []
        parts += [f"also has {listed(map(repr, more), _SHOWN)}"] if more else []
        raise DataError(
            f"expected the same {table.word}s in all files of {path}; found that {name} {' and '.join(parts)}, unlike "
            f"{first}."
        )
