"""Room for a run is looked for before anything is measured."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import InputError
from stretto.runs.begin import TRIED_BYTES, check_room


def test_a_disk_that_is_nearly_full_is_told_with_the_path_and_what_is_free(tmp_path: Path) -> None:
    check_room(tmp_path / "runs" / "first")
    assert list(tmp_path.iterdir()) == [], "nothing is left of the look"
    with pytest.raises(InputError, match=r"runs/first: .*bytes at least.* bytes are free there"):
        check_room(tmp_path / "runs" / "first", least_bytes=1 << 62)


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "cannot be written: No space left on device"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "cannot be written: Disk quota exceeded"),
        (TRIED_BYTES // 2, "only 32,768 of 65,536 bytes"),
    ],
)
def test_free_bytes_that_cannot_be_written_are_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: OSError | int, why: str
) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            del data
            if isinstance(outcome, OSError):
                raise outcome
            return outcome

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    with pytest.raises(InputError, match=f"{tmp_path}: .*{why}"):
        check_room(tmp_path)
