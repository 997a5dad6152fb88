"""The table of runs, for a terminal and for pasting."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from stretto.app.metrics import Metrics
from stretto.report.summary import Block, Cell, Row, Summary, summarise

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
    parts = [f"{block.title}\n\n{_markdown(heading, block)}" for block in summary.blocks]
    return "\n\n".join([*parts, "\n".join(_closing(summary))]) + "\n"


def _styled(cell: Cell) -> Text:
    return Text(_marked(cell), style="bold green" if cell.best else "")


def _marked(cell: Cell) -> str:
    # In front, so that digits stand below digits.
    return BEST_MARK + cell.text if cell.best else cell.text


def _closing(summary: Summary) -> list[str]:
    marked = any(cell.best for block in summary.blocks for row in block.rows for cell in row.cells)
    return [*summary.sentences, *([LEGEND] if marked else [])]


def _markdown(heading: Sequence[str], block: Block) -> str:
    rows = [_texts(row) for row in block.rows]
    widths = [max(len(row[i]) for row in [heading, *rows]) for i in range(len(heading))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| " + " | ".join(_aligned(i, text, width) for i, (text, width) in pairs) + " |"
        for line in (heading, rule, *rows)
        for pairs in [list(enumerate(zip(line, widths, strict=True)))]
    )


def _aligned(index: int, text: str, width: int) -> str:
    return text.ljust(width) if index == 0 else text.rjust(width)


def _texts(row: Row) -> list[str]:
    return [_in_cell(row.policy), row.completed, *(_marked(cell) for cell in row.cells)]


def _in_cell(text: str) -> str:
    """Without characters that end a Markdown cell."""
    return text.replace("|", "\\|")
