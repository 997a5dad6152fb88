"""Files at an fsspec URL: a bucket, a shared folder, whatever fsspec can open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.torch.checkpoint_files import Content, difference, measured
from stretto.wire.store_url import check_store


class StoreError(Exception):
    """The store did not do what it was asked to; it may tomorrow."""


class Store:
    """Whole files by name under one URL. Names have `/` between their parts.

    Whatever the file system raises comes out as StoreError, except that FileNotFoundError says that there is
    no such file.
    """

    def __init__(self, url: str) -> None:
        check_store(url)  # what cannot work tomorrow either is said at once
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self._files: Any = None
        self._root = ""

    def where(self, name: str) -> str:
        """The URL of a file."""
        return f"{self.url}/{name}"

    def put(self, name: str, source: Path, content: Content) -> None:
        """Copy a file there and read it again: no other check means the same in every store."""
        with _as_store_error():
            files, path = self._at(name)
            try:
                files.put_file(str(source), path)
            except FileNotFoundError:  # stores that have folders want them made
                files.makedirs(path.rpartition("/")[0], exist_ok=True)
                files.put_file(str(source), path)
        if problem := self._problem(name, content):
            raise StoreError(f"{self.where(name)} {problem}")

    def holds(self, name: str, content: Content) -> bool:
        """Whether there is a file of this name with this content."""
        return not self._problem(name, content)

    def get(self, name: str, target: Path) -> None:
        with _as_store_error(missing=True):
            files, path = self._at(name)
            files.get_file(path, str(target))

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        with _as_store_error(missing=True):
            files, path = self._at(name)
            return bytes(files.cat_file(path))

    def names(self) -> list[str]:
        """The first parts of all names, sorted."""
        with _as_store_error():
            files, path = self._at("")
            files.invalidate_cache()  # somebody else may have written
            try:
                found = files.ls(path, detail=False)
            except FileNotFoundError:  # nothing was put there yet
                return []
            return sorted({one.rstrip("/").rpartition("/")[2] for one in found})

    def delete(self, name: str) -> None:
        """A file, or all whose names begin with these parts; none is fine, too."""
        with _as_store_error():
            files, path = self._at(name)
            with contextlib.suppress(FileNotFoundError):
                files.rm(path, recursive=True)

    def _problem(self, name: str, content: Content) -> str:
        with _as_store_error():
            files, path = self._at(name)
            files.invalidate_cache()
            try:
                with files.open(path, "rb") as file:
                    return difference(measured(file), content)
            except FileNotFoundError:
                return "is missing"

    def _at(self, name: str) -> tuple[Any, str]:
        """The file system, opened when it is first needed, and what it calls a file of this name."""
        if self._files is None:
            import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra

            self._files, root = fsspec.core.url_to_fs(self.url)
            self._root = root.rstrip("/")
        return self._files, f"{self._root}/{name}".rstrip("/")


@contextlib.contextmanager
def _as_store_error(*, missing: bool = False) -> Iterator[None]:
    """`missing`: that there is no such file is an answer."""
    try:
        yield
    except Exception as error:
        if missing and isinstance(error, FileNotFoundError):
            raise
        first_line = str(error).partition("\n")[0]
        raise StoreError(": ".join(filter(None, (type(error).__name__, first_line)))) from error
