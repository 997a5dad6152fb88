"""How much of the house a reader walks through: files of a real tune, modules of a command, sizes and names.

The traced tune trains a study with a [profile] on four slots of this machine, and resizes trials.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
from common import ROOT, TEST_HELPERS, verdict

sys.path += TEST_HELPERS

from stretto.cli.main import app
from stretto.core.events import Decided
from stretto.core.instructions import Action
from stretto.runs.folder import RunFolder
from stretto.substrate.local.ground import LocalSubstrate
from tune_world import KNOWN, TRAIN

SOURCE = ROOT / "src" / "stretto"
FRONT_ROOMS = ("cli", "launch", "runs", "driving", "profiling")
MOST_FILES = 120
MOST_FRONT_FILES = 25
MOST_MODULES = {"explain": 60, "simulate": 110}
IS_FUNCTION = 0x1
"""The flag of a code object that is a function's, not a module's or a class's."""
STUDY = KNOWN.replace("max_epochs = 8", "max_epochs = 16").replace("trials = 6", "trials = 4")


class Trace:
    """Our files whose functions are called in this process."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.before: set[str] | None = None
        """Those before the first instruction."""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & IS_FUNCTION and code.co_filename.startswith(str(SOURCE)):
            self.files.add(code.co_filename)
            if code is LocalSubstrate.apply.__code__ and self.before is None:
                self.before = set(self.files)


def traced_tune(folder: Path) -> Trace:
    """A real tune with at least one resize."""
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    (folder / "study.toml").write_text(STUDY, encoding="utf-8")
    trace = Trace()
    words = [str(folder / "study.toml"), f"{folder / 'train.py'}:train", "--slots", "4", "--deadline", "60s"]
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        app(["tune", *words, "--yes", "--json"], standalone_mode=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    events = list(RunFolder(Path("runs") / "tiny").events())
    decided = [one for event in events if isinstance(event, Decided) for one in event.instructions]
    assert any(one.action is Action.RESIZE for one in decided), "the tune had no resize"
    return trace


def modules_of(command: str, *words: str) -> int:
    """Our modules that a command loads."""
    code = (
        "import sys; sys.argv = ['stretto', *sys.argv[1:]]\n"
        "from stretto.cli.main import app\n"
        "try:\n    app(standalone_mode=False)\nexcept BaseException: pass\n"
        "print(sum(name.split('.')[0] == 'stretto' for name in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(  # noqa: S603 - a command of our own
        [sys.executable, "-c", code, command, *words], capture_output=True, text=True, check=True
    )
    return int(done.stderr.split()[-1])


def functions(tree: ast.AST) -> Iterator[int]:
    """The lines of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def main() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    trees = [ast.parse(text) for text in texts.values()]
    lengths = [lines for tree in trees for lines in functions(tree)]
    classes = Counter(
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    print(f"lines {sum(text.count(chr(10)) for text in texts.values())}, files {len(texts)}")
    print(f"function length: median {np.median(lengths):g}, p95 {np.percentile(lengths, 95):g}")
    print(f"public class names twice: {', '.join(name for name, n in classes.items() if n > 1) or 'none'}")
    with tempfile.TemporaryDirectory() as folder:
        trace = _in_folder(Path(folder))
        for command, words in (("explain", ["tiny"]), ("simulate", ["--study", "study.toml"])):
            count = modules_of(command, *words)
            print(f"{command} loads {count} modules: {verdict(count <= MOST_MODULES[command])}")
    rooms = Counter(Path(name).relative_to(SOURCE).parts[0] for name in trace.before or ())
    front = sum(rooms[room] for room in FRONT_ROOMS)
    print(f"a tune runs functions of {len(trace.files)} files: {verdict(len(trace.files) <= MOST_FILES)}")
    print(
        f"of {', '.join(FRONT_ROOMS)} before the first instruction: {front}: "
        f"{verdict(front <= MOST_FRONT_FILES)}"
    )
    for name in sorted(trace.files):
        print("  ", Path(name).relative_to(SOURCE), "" if name not in (trace.before or ()) else "(before)")


def _in_folder(folder: Path) -> Trace:
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return traced_tune(folder)


if __name__ == "__main__":
    main()
