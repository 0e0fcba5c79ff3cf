"""`python -m dist_env layout`: which rank is where, and which data it reads, as a table and as a picture."""

from __future__ import annotations

import argparse
import sys

from dist_env.errors import DistributedEnvironmentError
from dist_env.layout import MESH_DIMENSIONS, SHORT_NAMES, ParallelLayout
from dist_env.tables import format_table

OK, PROBLEMS, USAGE = 0, 1, 2
# More rows, or cells, than anybody reads.
_MAX_SHOWN = 65536
_CELL_WIDTH, _CELL_HEIGHT, _MARGIN, _COLUMNS = 120, 52, 16, 8


def run(options: argparse.Namespace) -> int:
    """Print the table of a layout, and write its picture if asked.

    Returns:
        0 if all is well, 1 if the picture cannot be written, 2 if an option is wrong.
    """
    try:
        world = None if options.world is None else _count("--world", options.world)
        on_a_host = _count("--ranks-per-host", options.ranks_per_host)
        layout = ParallelLayout.parse(options.layout, world)
        if layout.world_size > _MAX_SHOWN:
            raise DistributedEnvironmentError(
                f"The layout {layout} has {layout.world_size} ranks. At most {_MAX_SHOWN} are shown."
            )
    except DistributedEnvironmentError as error:
        print(f"dist_env layout: {error}", file=sys.stderr)
        return USAGE
    if options.svg is not None:
        try:
            options.svg.write_text(as_svg(layout, on_a_host), encoding="utf-8")
        except OSError as error:
            reason = error.strerror or type(error).__name__
            print(f"dist_env layout: {options.svg} cannot be written: {reason}.", file=sys.stderr)
            return PROBLEMS
    print(as_text(layout, on_a_host))
    return OK


def as_text(layout: ParallelLayout, ranks_per_host: int) -> str:
    """One row for each rank: its host, its index in each dimension, the data it reads, what it counts."""
    shown = _shown(layout)
    rows = []
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        counts = "yes" if layout.counts_tokens(rank) else "no"
        indices = [place[name] for name in shown]
        rows.append((rank, rank // ranks_per_host, *indices, layout.data_rank(rank), counts))
    header = ("rank", "host", *(SHORT_NAMES[name] for name in shown), "data", "counts tokens")
    table = format_table(header, rows, right=range(len(header) - 1))
    hosts = -(-layout.world_size // ranks_per_host)
    parts = f"{layout.data_count} part(s) of the data"
    return f"{table}\n\n{layout}: {layout.world_size} rank(s) on {hosts} host(s), {parts}"


def as_svg(layout: ParallelLayout, ranks_per_host: int) -> str:
    """A picture: a cell for each rank, grouped by host, coloured by the data that it reads."""
    columns = min(ranks_per_host, _COLUMNS, layout.world_size)
    width = max(columns * _CELL_WIDTH, 480) + 2 * _MARGIN
    y = 64
    body = [
        f'<text x="{_MARGIN}" y="26" font-size="16">{layout}: {layout.world_size} ranks</text>',
        f'<text x="{_MARGIN}" y="46">Equal colours read the same data. A thick border: counts tokens.</text>',
    ]
    for host, first in enumerate(range(0, layout.world_size, ranks_per_host)):
        y += 18
        body.append(f'<text x="{_MARGIN}" y="{y}" font-weight="bold">host {host}</text>')
        y += 6
        ranks = range(first, min(first + ranks_per_host, layout.world_size))
        for index, rank in enumerate(ranks):
            row, column = divmod(index, columns)
            body += _cell(layout, rank, _MARGIN + column * _CELL_WIDTH, y + row * _CELL_HEIGHT)
        y += -(-len(ranks) // columns) * _CELL_HEIGHT + 8
    size = f'width="{width}" height="{y + _MARGIN}" viewBox="0 0 {width} {y + _MARGIN}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    back = f'<rect width="{width}" height="{y + _MARGIN}" fill="white"/>'
    return "\n".join([head, f"<title>{layout}</title>", back, *body, "</svg>", ""])


def _cell(layout: ParallelLayout, rank: int, x: int, y: int) -> list[str]:
    place = layout.coordinates(rank)
    part = layout.data_rank(rank)
    # Steps of the golden angle keep neighbours apart; so light that black text stands out.
    fill = f"hsl({part * 137.508 % 360:.0f}, 70%, {80 + part % 3 * 5}%)"
    border = 2.5 if layout.counts_tokens(rank) else 0.8
    where = " ".join(f"{SHORT_NAMES[name]}{place[name]}" for name in _shown(layout))
    # Five or six dimensions do not fit at full size.
    small = ' font-size="8"' if len(where) > 18 else ' font-size="10"'
    return [
        f'<g id="rank-{rank}"><rect x="{x + 2}" y="{y + 2}" width="{_CELL_WIDTH - 4}" '
        f'height="{_CELL_HEIGHT - 4}" rx="4" fill="{fill}" stroke="black" stroke-width="{border}"/>',
        f'<text x="{x + 8}" y="{y + 21}">rank {rank}, data {part}</text>',
        f'<text x="{x + 8}" y="{y + 39}"{small}>{where}</text></g>',
    ]


def _shown(layout: ParallelLayout) -> list[str]:
    """The dimensions of more than one rank."""
    return [name for name in (*MESH_DIMENSIONS, "expert") if getattr(layout, name) > 1]


def _count(option: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or not int(text):
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        raise DistributedEnvironmentError(
            f"{option}={shown!r} is not a number of ranks. Give an integer of 1 or more, such as {option} 8."
        )
    return int(text)
