"""`from_lines` gives the lines that `open` gives, for any encoding, and enters a file at a byte when resumed."""

from __future__ import annotations

import encodings.aliases
import gzip
import io
import itertools
import json
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipes as p
from pipes import Pipeline, execute, pipe
from pipes.testing import check_pipeline

pytestmark = pytest.mark.filterwarnings("ignore:resuming replays:UserWarning")

ENCODINGS = ["utf-8", "utf-8-sig", "latin-1", "cp1252", "ascii", "utf-16", "utf-16-le", "utf-32", "shift_jis"]
ALPHABET = "ab\n\r\n\r\x0b\x0c\x1c é\x85ñ\u2028ア日\U0001f600\ufeff"
NEWLINES = [None, "", "\n", "\r", "\r\n"]
SUFFIXES = [".txt", ".txt.gz"]
FORK: dict[str, Any] = {"start_method": "fork"}


def text(encoding: str) -> st.SearchStrategy[str]:
    """Draw text with every kind of line end, and with characters that only `str.splitlines` takes for one."""
    alphabet = st.sampled_from(ALPHABET)

    def kept(s: str) -> str:
        return s.encode(encoding, "ignore").decode(encoding, "ignore")

    return st.lists(st.one_of(alphabet, st.just("\r\n"), st.text(max_size=3)), max_size=25).map("".join).map(kept)


@contextmanager
def files(*contents: bytes, suffix: str = ".txt") -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}{suffix}" for i in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
        yield paths


def lines_of(path: Path, **options: Any) -> list[str]:
    """The lines of `open` or `gzip.open`."""
    with gzip.open(path, "rt", **options) if path.suffix == ".gz" else path.open(**options) as file:
        return list(file)


@st.composite
def cases(draw: Any) -> tuple[str, str, list[bytes], dict[str, Any]]:
    """Draw an encoding, a suffix, what some files hold, and options."""
    encoding = draw(st.sampled_from(ENCODINGS))
    contents = [s.encode(encoding) for s in draw(st.lists(text(encoding), max_size=3))]
    options = {"encoding": encoding, "newline": draw(st.sampled_from(NEWLINES))}
    return encoding, draw(st.sampled_from(SUFFIXES)), contents, options


@settings(max_examples=settings().max_examples * 4)
@given(cases())
def test_the_lines_are_those_of_open(case: tuple[str, str, list[bytes], dict[str, Any]]) -> None:
    _, suffix, contents, options = case
    with files(*contents, suffix=suffix) as paths:
        expected = [line for path in paths for line in lines_of(path, **options)]
        assert list(pipe(p.from_lines(paths, **options))) == expected


@settings(max_examples=settings().max_examples * 2)
@given(cases(), st.lists(st.sampled_from(["batch", "window", "shard", "map"]), max_size=2, unique=True))
def test_reading_can_be_cut_anywhere(case: tuple[str, str, list[bytes], dict[str, Any]], stages: list[str]) -> None:
    made = {"batch": p.batch(2), "window": p.shuffle_buffer(3), "shard": p.shard_by_worker(2), "map": p.map(len)}
    _, suffix, contents, options = case
    chosen = [made[s] for s in stages if s != "map" or "batch" not in stages]
    with files(*contents, suffix=suffix) as paths:
        check_pipeline(pipe(p.from_lines(paths, **options), *chosen))


@settings(max_examples=settings().max_examples // 3)
@given(
    st.lists(st.text(st.sampled_from("ab\r\n"), max_size=40), min_size=1, max_size=4),
    st.integers(0, 30),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(SUFFIXES),
)
def test_workers_and_resumes_change_nothing(
    contents: list[str], cut: int, workers: int, others: int, suffix: str
) -> None:
    with files(*[s.encode() for s in contents], suffix=suffix) as paths:
        for pipeline in (
            pipe(p.from_lines(paths), p.shuffle_buffer(4), p.map(len), p.batch(2)),
            pipe(p.from_lines(paths), p.shard_by_worker(3), p.shuffle_buffer(3), p.map(len)),
        ):
            with execute(pipeline, workers=workers, **FORK) as loader:
                got = list(itertools.islice(loader, cut)) if cut else []
                state = json.loads(json.dumps(loader.state_dict()))
            with execute(pipeline, workers=others, **FORK) as loader:
                loader.load_state_dict(state)
                got += list(loader)
                expected = list(pipeline)
                ended = state["epoch"] == 1
                assert got == expected + (list(pipeline.at_epoch(1)) if ended else [])


@pytest.mark.parametrize("newline", NEWLINES)
def test_long_lines_and_ends_across_the_readers_buffer(newline: str | None) -> None:
    size = io.DEFAULT_BUFFER_SIZE
    content = b"".join(b"x" * n + end for n in (size - 1, size, size + 1, 0, 3 * size - 1) for end in (b"\r\n", b"\r"))
    with files(content) as (path,):
        pipeline = pipe(p.from_lines(path, newline=newline))
        assert list(pipeline) == lines_of(path, newline=newline)
        check_pipeline(pipeline)


@pytest.mark.parametrize("encoding", sorted(set(encodings.aliases.aliases.values()) | {"utf_8_sig"}))
def test_every_encoding_that_open_takes_gives_its_lines(encoding: str) -> None:
    try:
        "".encode(encoding).decode(encoding)
        known = "".join(c for c in ALPHABET if c == c.encode(encoding, "ignore").decode(encoding, "ignore"))
    except (LookupError, AssertionError, TypeError, UnicodeError):  # from bytes to bytes, or of another system
        return
    content = (f"{known}\r\nan end in each way\n{known}\r{known}\n\n{known}\\n{known}").encode(encoding)
    with files(content) as (path,):
        pipeline = pipe(p.from_lines(path, encoding=encoding))
        assert list(pipeline) == lines_of(path, encoding=encoding)
        check_pipeline(pipeline)


def test_a_file_of_one_kind_of_end_is_not_read_as_a_whole(tmp_path: Path, counted: type[Counted]) -> None:
    for end, newline in itertools.product(["\n", "\r", "\r\n"], NEWLINES):
        if newline in (None, "", end):
            (tmp_path / "a").write_bytes(f"line{end}".encode() * 50_000)
            counted.total = 0
            assert next(iter(pipe(p.from_lines(tmp_path / "a", newline=newline)))).startswith("line")
            assert counted.total < 16 * io.DEFAULT_BUFFER_SIZE, (end, newline)


@pytest.mark.parametrize("errors", ["replace", "ignore", "surrogateescape", "backslashreplace"])
@given(content=st.binary(max_size=40))
def test_bytes_that_are_no_text_are_treated_as_open_does(errors: str, content: bytes) -> None:
    for encoding in ("utf-8", "ascii", "utf-8-sig"):
        with files(content) as (path,):
            options: dict[str, Any] = {"encoding": encoding, "errors": errors}
            assert list(pipe(p.from_lines(path, **options))) == lines_of(path, **options)


# Seeks ----------------------------------------------------------------------------------------------------------------


class Counted(io.BufferedReader):
    """A file that counts the bytes read from it."""

    total = 0

    def _counted(self, data: bytes) -> bytes:
        Counted.total += len(data)
        return data

    def read(self, size: int | None = -1, /) -> bytes:
        return self._counted(super().read(size))

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._counted(super().readline(size))

    def __next__(self) -> bytes:
        return self._counted(super().__next__())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    """Count what is read through `Path.open` in binary mode."""

    ordinary = Path.open

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        return Counted(io.FileIO(path)) if mode == "rb" else ordinary(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)
    Counted.total = 0
    return Counted


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize("newline", NEWLINES)
def test_a_resume_seeks(newline: str | None, encoding: str, tmp_path: Path, counted: type[Counted]) -> None:
    end = newline or "\n"
    content = "".join(f"{i:06}é{end}" for i in range(9_000)).encode(encoding)
    paths = []
    for name in "abc":
        paths.append(tmp_path / name)
        (tmp_path / name).write_bytes(content)
    pipeline = pipe(p.from_lines(paths, encoding=encoding, newline=newline))
    with execute(pipeline) as loader:
        line = list(itertools.islice(loader, 17_000))[-1]  # in the second file
        state = loader.state_dict()
    counted.total = 0
    with execute(pipeline) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader)).strip() == f"{int(line[:6]) + 1:06}é"
        assert counted.total < 2 * io.DEFAULT_BUFFER_SIZE
        loader.load_state_dict(state)
        assert len(list(loader)) == 10_000


@pytest.mark.filterwarnings("error")
def test_a_resume_behind_windows_and_shards_reads_little(tmp_path: Path, counted: type[Counted]) -> None:
    (tmp_path / "a").write_text("".join(f"{i:06}\n" for i in range(20_000)))
    pipeline = pipe(p.from_lines(tmp_path / "a"), p.shard_by_worker(2), p.shuffle_buffer(16))
    with execute(pipeline) as loader:
        got = list(itertools.islice(loader, 16_000))
        state = loader.state_dict()
    counted.total = 0
    with execute(pipeline) as loader:
        loader.load_state_dict(state)
        rest = iter(loader)
        following = list(itertools.islice(rest, 10))
        assert counted.total < 4 * io.DEFAULT_BUFFER_SIZE
        got += [*following, *rest]
    assert got == list(pipeline)


def test_a_cursor_is_small_however_many_files_there_are(tmp_path: Path) -> None:
    paths = [tmp_path / f"with a rather long name {i}" for i in range(300)]
    for path in paths:
        path.write_text("a\nb\n")
    with execute(pipe(p.from_lines(paths))) as loader:
        assert len(list(itertools.islice(loader, 501))) == 501
        state = loader.state_dict()
    assert len(json.dumps(state)) < 2048
    with execute(pipe(p.from_lines(paths))) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == 99


# Errors ---------------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("a\n")
    with pytest.raises(FileNotFoundError, match="missing"):
        p.from_lines([tmp_path / "there", tmp_path / "missing"])
    with pytest.raises((OSError, ValueError), match=tmp_path.name):
        list(pipe(p.from_lines(tmp_path)))


@pytest.mark.parametrize("ways", [{"workers": 0}, {"workers": 2, **FORK}], ids=["serial", "fork"])
@pytest.mark.parametrize("shards", [0, 2])
def test_a_file_that_vanishes_is_an_error_that_names_it(ways: dict[str, Any], shards: int, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text("a\nb\n")
    pipeline = pipe(p.from_lines([tmp_path / "a", tmp_path / "b"]), *([p.shard_by_worker(shards)] if shards else []))
    (tmp_path / "b").unlink()
    got: list[str] = []
    with execute(pipe(pipeline, p.map(str)), **ways) as loader, pytest.raises(FileNotFoundError) as caught:
        got.extend(loader)
    assert str(tmp_path / "b") in str(caught.value)
    assert len(got) == 2


def noted(pipeline: Pipeline, **way: Any) -> tuple[list[str], BaseException, str]:
    """Return what came before an exception, the exception, and its notes."""
    got: list[str] = []
    with execute(pipeline, **way) as loader:
        try:
            got.extend(loader)
        except Exception as error:
            return got, error, "\n".join(getattr(error, "__notes__", []))
    raise AssertionError("no exception")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("newline", NEWLINES)
@pytest.mark.parametrize("ways", [{"workers": 0}, {"workers": 1, **FORK}], ids=["serial", "fork"])
def test_a_bad_byte_is_an_error_that_names_file_and_line(
    ways: dict[str, Any], newline: str | None, suffix: str
) -> None:
    end = (newline or "\n").encode()
    with files(b"fine" + end, b"one" + end + b"two" + end + b"th\xffree" + end + b"four", suffix=suffix) as paths:
        got, error, notes = noted(pipe(p.from_lines(paths, newline=newline), p.map(str.strip)), **ways)
        assert got == ["fine", "one", "two"]
        assert isinstance(error, UnicodeDecodeError)
        assert str(paths[1]) in notes
        assert "line 3" in notes


def test_a_bad_byte_is_named_by_its_own_line_behind_a_resume() -> None:
    with files(b"one\ntwo\nth\xffree\n") as paths:
        pipeline = pipe(p.from_lines(paths))
        with execute(pipeline) as loader:
            next(iter(loader))
            state = loader.state_dict()
        with execute(pipeline) as loader:
            loader.load_state_dict(state)
            running = iter(loader)
            assert next(running) == "two\n"
            with pytest.raises(UnicodeDecodeError) as caught:
                next(running)
        assert "line 3" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_a_truncated_character_is_an_error_that_names_file_and_line(encoding: str) -> None:
    with files("one\ntwo".encode(encoding)[:-1]) as paths:
        _, error, notes = noted(pipe(p.from_lines(paths, encoding=encoding)))
        assert isinstance(error, UnicodeDecodeError)
        assert str(paths[0]) in notes
        assert "line" in notes


@pytest.mark.parametrize("cut", [15, 25])
def test_a_truncated_gz_is_an_error_that_names_it(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d\n" % (i * i) for i in range(999)))[:-cut])
    _, error, notes = noted(pipe(p.from_lines(path)))
    assert isinstance(error, (EOFError, OSError))
    assert str(path) in notes


def test_what_is_no_gz_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_text("plain")
    _, error, notes = noted(pipe(p.from_lines(tmp_path / "a.gz")))
    assert isinstance(error, OSError)
    assert str(tmp_path / "a.gz") in notes


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"encoding": "utf-7000"}, LookupError, "utf-7000"),
        ({"encoding": None}, TypeError, "encoding"),
        ({"errors": "none"}, (LookupError, ValueError), "errors"),
        ({"newline": "x"}, ValueError, "newline"),
        ({"newline": "\n\n"}, ValueError, "newline"),
    ],
    ids=str,
)
def test_a_bad_argument_is_an_error_at_construction(arguments: Any, kind: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    with pytest.raises(kind, match=words):
        p.from_lines(tmp_path / "a", **arguments)


@pytest.mark.parametrize("paths", [3, None, [3], [None], b"bytes"], ids=repr)
def test_what_is_no_path_is_an_error_at_construction(paths: Any) -> None:
    with pytest.raises((TypeError, FileNotFoundError)):
        p.from_lines(paths)


# A value like any other -----------------------------------------------------------------------------------------------


def test_a_source_of_lines_is_a_value(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a\nb\n")
    source = p.from_lines(tmp_path / "a")
    assert source == p.from_lines(str(tmp_path / "a")) == p.from_lines([tmp_path / "a"])
    assert source != p.from_lines(tmp_path / "a", newline="")
    assert pickle.loads(pickle.dumps(source)) == source
    assert repr(source).startswith("from_lines(")
    assert " at 0x" not in repr(source)
    pipeline = pipe(source)
    assert list(pipeline) == list(pipeline) == ["a\n", "b\n"]


def test_no_file_and_empty_files_have_no_lines() -> None:
    assert list(pipe(p.from_lines([]))) == []
    with files(b"", b"a", b"") as paths:
        assert list(pipe(p.from_lines(paths))) == ["a"]
        check_pipeline(pipe(p.from_lines(paths)))


def test_paths_may_be_a_generator_and_are_read_once(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    pipeline = pipe(p.from_lines(tmp_path / name for name in "ab"))
    assert list(pipeline) == list(pipeline) == ["a", "b"]


def test_an_abandoned_run_closes_its_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a\nb\n" * 9)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    for suffix in ("a", "b.gz"):
        (tmp_path / "b.gz").write_bytes(gzip.compress(b"a\nb\n"))
        for _ in pipe(p.from_lines(tmp_path / suffix), p.batch(1)):
            break
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
