"""A folder for training that is only tried, which leaves at most its logs behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.app.run_folder import RunFolder
from stretto.core.errors import InputError


@contextmanager
def scratch(purpose: str, parent: Path | None = None) -> Iterator[RunFolder]:
    """The folder of a run that is thrown away, but for the logs where the training's owner is to mend it.

    It is in `parent`, else where such things usually are.
    """
    place = Path(tempfile.mkdtemp(prefix=f"stretto-{purpose}-", dir=parent))
    try:
        yield RunFolder(place)
    except InputError:
        _keep_logs(place)
        raise
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    shutil.rmtree(place, ignore_errors=True)


def _keep_logs(place: Path) -> None:
    logs = set(place.glob("jobs/*/stdout.log"))
    folders = {folder for log in logs for folder in log.parents}
    for path in sorted(place.rglob("*"), reverse=True):
        if path in logs or path in folders:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if not logs:
        shutil.rmtree(place, ignore_errors=True)
