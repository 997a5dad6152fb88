"""The command line in a folder with a study, for the tests of the commands about studies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from test_cli import Stretto


class StudyCommand(Stretto):
    """Runs the command in this process."""

    def json(self, *words: object, code: int = 0) -> Any:
        ended, out, _ = self(*words, "--json")
        assert ended == code
        return json.loads(out)

    def refused(self, *words: object) -> str:
        """What is said to something wrong: a sentence, exit code 2, and nothing on standard output."""
        code, out, err = self(*words)
        assert code == 2
        assert out == ""
        assert "Traceback" not in err
        return err


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def without_libraries(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", text)
