"""Pages of prose with generated tables between markers.

    <!-- table idle: `vtoken bench tables` writes it -->

    | ... |

    <!-- end of table -->

Whatever stands between the two lines is replaced; everything else stays as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from vtoken.core.errors import ConfigError
from vtoken.results.files import Result

Results = Mapping[str, Result]
Table = Callable[[Results], str]
"""Markdown of one table, made of all result files."""

BLOCK = re.compile(
    r"(?P<begin><!-- table (?P<name>[a-z0-9-]+):[^\n]*-->\n)(?P<body>.*?)(?P<end><!-- end of table -->)", re.DOTALL
)


def filled(page: str, tables: Mapping[str, Table], results: Results, where: str) -> str:
    """The page with its tables.

    Raises:
        ConfigError: it asks for an unknown table, or a table has no end; `where` names the page.
    """

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in tables:
            raise ConfigError(where, f"<!-- table {name} -->", f"one of {', '.join(sorted(tables))}")
        return f"{match['begin']}\n{tables[name](results)}\n{match['end']}"

    if len(BLOCK.findall(page)) != page.count("<!-- table "):
        raise ConfigError(
            where, "<!-- table ... -->", "a name with a colon behind it, and an <!-- end of table --> each"
        )
    return BLOCK.sub(table, page)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a row may be shorter than the head."""
    lines = [_line(head), "|" + "---|" * len(head)]
    return "\n".join([*lines, *(_line([*row, *[""] * (len(head) - len(row))]) for row in rows)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |" if any(cells) else "|" + " |" * len(cells)
