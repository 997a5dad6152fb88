"""The entry point of the `stretto` command, which Ctrl-C ends without a traceback during imports."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Import the command line with the default Ctrl-C handler, then run it."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from stretto.cli.main import import_command  # noqa: PLC0415
    from stretto.cli.main import main as run  # noqa: PLC0415

    import_command(sys.argv[1:])

    signal.signal(signal.SIGINT, handler)
    run()
