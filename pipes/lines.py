"""`from_lines`: text files, line by line, that a resume can enter at a byte.

Laws: the lines are those of `open(path, encoding=..., errors=..., newline=...)`; running from the cursor that came with
a line gives exactly the lines behind it, after one seek.
"""

from __future__ import annotations

import builtins
import codecs
import gzip
import io
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import IO, Any

from pipes.context import Context, Cursor, Pair
from pipes.errors import check_choice
from pipes.nodes import Node, Stepping
from pipes.stage import Source
from pipes.values import value


@value
class from_lines(Source):
    r"""Read text files line by line, one file after the other.

    >>> import tempfile
    >>> from pipes import pipe
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(b"one\r\ntwo"), file.flush()
    ...     list(pipe(from_lines(file.name)))
    ['one\n', 'two']

    `paths` is a path or an iterable of paths; those that end in ".gz" are decompressed. Lines are what `open` gives for
    `encoding`, `errors` and `newline`: by default a line ends at "\n", "\r" or "\r\n", and keeps its end as "\n". A
    missing file is a `FileNotFoundError` when the source is made; bytes that are no text are a `UnicodeDecodeError`
    with a note of file and line (counted from 1). A resume seeks; in a ".gz" it decompresses, and in an encoding whose
    line ends are not those of ASCII, such as UTF-16, it reads again. Holds one line, and 8 KB of the file.
    """

    paths: Any
    encoding: str = field(default="utf-8", kw_only=True)
    errors: str = field(default="strict", kw_only=True)
    newline: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        one = isinstance(self.paths, str) or hasattr(self.paths, "__fspath__")
        paths = [self.paths] if one else list(self.paths)
        object.__setattr__(self, "paths", tuple(builtins.map(str, paths)))
        for path in self.paths:
            if not Path(path).exists():
                raise FileNotFoundError(f"`paths` must be files, got {path!r}, which does not exist; check the folder")
        for name, look_up in (("encoding", codecs.lookup), ("errors", codecs.lookup_error)):
            try:
                look_up(getattr(self, name))
            except (LookupError, TypeError) as error:
                raise type(error)(f"`{name}` must be one that Python knows, got {getattr(self, name)!r}") from error
        if self.newline is not None:
            check_choice("newline", self.newline, ("", "\n", "\r", "\r\n"))

    def holds(self) -> str:
        """See `Source.holds`."""
        return "1 line"

    def bind(self, context: Context) -> Node:
        """See `Source.bind`."""
        return Stepping(self._lines, context.at(name="source"))

    def _lines(self, _: Context, cursor: Cursor) -> Iterator[Pair]:
        """Give (line, cursor after it); a cursor is (file, byte, lines of the file before it)."""
        first, offset, count = cursor or (0, 0, 0)
        for number in builtins.range(first, len(self.paths)):
            path = self.paths[number]
            try:
                for line, size in self._of_file(path, offset, count):
                    offset, count = offset + size, count + 1
                    yield line, (number, offset, count)
            except Exception as error:
                error.add_note(f"pipes: in {path!r}, line {count + 1}")
                raise
            offset = count = 0

    def _of_file(self, path: str, offset: int, count: int) -> Iterator[tuple[str, int]]:
        if _ends_lines_in_bytes(self.encoding):
            yield from self._by_bytes(path, offset)
        else:
            yield from self._by_text(path, count)

    def _by_text(self, path: str, count: int) -> Iterator[tuple[str, int]]:
        with _opened(path) as binary, io.TextIOWrapper(binary, self.encoding, self.errors, self.newline) as text:
            for number, line in builtins.enumerate(text):
                if number >= count:
                    yield line, 0

    def _by_bytes(self, path: str, offset: int) -> Iterator[tuple[str, int]]:
        signed = codecs.lookup(self.encoding).name == "utf-8-sig"
        encoding = "utf-8" if signed else self.encoding
        with _opened(path) as file:
            mark = len(codecs.BOM_UTF8) if signed and not offset and file.read(3) == codecs.BOM_UTF8 else 0
            file.seek(offset + mark)
            for raw in self._raw_lines(file):
                line = raw.decode(encoding, self.errors)
                if self.newline is None and line.endswith(("\r\n", "\r")):
                    line = line[: -2 if line.endswith("\r\n") else -1] + "\n"
                if line:  # else bytes that `errors` leaves out
                    yield line, mark + len(raw)
                mark = 0 if line else mark + len(raw)

    def _raw_lines(self, file: IO[bytes]) -> Iterator[bytes]:
        if self.newline == "\n":
            yield from file
            return
        rest = b""
        while chunk := file.read(CHUNK):
            *whole, rest = self._split(rest + chunk)
            yield from whole
        *whole, rest = self._split(rest)
        yield from whole
        yield from [rest] if rest else []

    def _split(self, data: bytes) -> list[bytes]:
        """Cut behind each end of a line; the last piece may go on: it has no end, or one that a newline may follow."""
        if self.newline:
            end = self.newline.encode()
            *whole, rest = data.split(end)
            return [*(line + end for line in whole), rest]
        lines = data.splitlines(keepends=True)  # of bytes: at "\n", "\r" and "\r\n" only
        return [*lines, b""] if data.endswith(b"\n") else lines or [b""]


CHUNK = 1 << 13


def _ends_lines_in_bytes(encoding: str) -> bool:
    """Whether a line's end is the same bytes as in ASCII, as in UTF-8 and not in UTF-16 or EBCDIC."""
    name = codecs.lookup(encoding).name
    stateful = name.startswith(("iso2022", "hz", "utf-7"))  # a line may depend on the one before
    return name == "utf-8-sig" or (not stateful and "\r\n".encode(encoding) == b"\r\n")


def _opened(path: str) -> IO[bytes]:
    opened: Any = gzip.open(path, "rb") if path.endswith(".gz") else Path(path).open("rb")  # noqa: SIM115  # closed by its reader
    binary: IO[bytes] = opened
    return binary
