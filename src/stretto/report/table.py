"""The table of runs, for a terminal and for pasting."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from stretto.app.metrics import Metrics
from stretto.report.summary import Cell, Row, Summary, summarise
from stretto.report.text_table import markdown_table

BEST_MARK = "*"
LEGEND = f"{BEST_MARK} best of its block"


def metrics_table(runs: Sequence[Metrics]) -> Table:
    """The runs as a table for a terminal of 100 columns, a block per workload; the text has more columns."""
    summary = summarise(runs, details=False)
    table = Table(
        box=box.SIMPLE,
        padding=(0, 0),
        pad_edge=False,
        caption=Text("\n".join(_closing(summary))),
        caption_justify="left",
    )
    table.add_column("policy", overflow="fold", min_width=10)
    for title in ("jobs done", *(column.title for column in summary.columns)):
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    for block in summary.blocks:
        table.add_row(Text(block.title, style="bold"))
        for row in block.rows:
            done = Text(row.completed, style="bold red" if row.unfinished else "")
            table.add_row(Text(row.policy), done, *(_styled(cell) for cell in row.cells))
        table.add_section()
    return table


def metrics_text(runs: Sequence[Metrics]) -> str:
    """The same as Markdown that reads well as it is: no colours, nothing cut off."""
    summary = summarise(runs)
    heading = ["policy", "jobs done", *(column.title for column in summary.columns)]
    parts = [
        f"{block.title}\n\n{markdown_table(heading, [_texts(row) for row in block.rows])}"
        for block in summary.blocks
    ]
    return "\n\n".join([*parts, "\n".join(_closing(summary))]) + "\n"


def _styled(cell: Cell) -> Text:
    return Text(_marked(cell), style="bold green" if cell.best else "")


def _marked(cell: Cell) -> str:
    # In front, so that digits stand below digits.
    return BEST_MARK + cell.text if cell.best else cell.text


def _closing(summary: Summary) -> list[str]:
    marked = any(cell.best for block in summary.blocks for row in block.rows for cell in row.cells)
    return [*summary.sentences, *([LEGEND] if marked else [])]


def _texts(row: Row) -> list[str]:
    return [row.policy, row.completed, *(_marked(cell) for cell in row.cells)]
