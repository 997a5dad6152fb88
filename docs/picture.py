"""Draws docs/demo.svg, the terminal picture of the README, from a real run."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from stretto import Setup, simulate
from stretto.core.cluster import gpu_nodes
from stretto.report.tables import metrics_table
from stretto.worlds.synthetic import demo_workload

POLICIES = ("pollux", "optimus", "tiresias")


def main() -> None:
    setup = Setup(nodes=gpu_nodes(4, 4))
    metrics = [simulate(demo_workload(), policy, setup).metrics for policy in POLICIES]
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(f"$ stretto simulate --policy {','.join(POLICIES)}", style="bold", highlight=False)
    console.print(metrics_table(metrics))
    svg = console.export_svg(title="40 training jobs share 16 GPUs, simulated", clear=False)
    # The picture must not fetch fonts: the reader's monospaced one will do.
    Path(__file__).with_name("demo.svg").write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
