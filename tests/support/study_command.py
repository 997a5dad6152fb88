"""The command line in a folder with a study, for the tests of the commands about studies."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.cli.main import main


class Stretto:
    """Runs the command in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *words: object) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        self._monkeypatch.setattr(sys, "argv", ["stretto", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else int(code is not None)), out, err


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
