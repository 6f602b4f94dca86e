"""Writes are complete or do not happen, and replace nothing but regular files."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trimtab import InputError, RoutingTrace, write_trace
from trimtab.cli.main import main
from trimtab.files import atomic_file, write_atomically, write_json
from trimtab.trace import synthesize


@pytest.fixture
def trace() -> RoutingTrace:
    return synthesize(num_sequences=2, sequence_length=4, num_layers=1, num_experts=8, top_k=2, zipf=1.0)


@contextmanager
def reading(pipe: Path) -> Iterator[list[bytes]]:
    """A list that has all that was written into the pipe when the context ends."""
    content: list[bytes] = []
    thread = threading.Thread(target=lambda: content.append(pipe.read_bytes()), daemon=True)
    thread.start()
    yield content
    thread.join(60)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_old_content_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_atomically(path, "old\n")
    with atomic_file(path) as file:
        file.write(b"first part, ")
        file.flush()
        assert path.read_text() == "old\n"
        file.write(b"second part")
    assert path.read_text() == "first part, second part"
    assert names_in(path.parent) == ["file"]


def test_content_is_on_disk_before_it_replaces_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, move = os.fsync, os.replace

    def log_sync(descriptor: int) -> None:
        opened = Path(f"/proc/self/fd/{descriptor}")
        events.append("folder on disk" if opened.is_dir() else f"on disk: {opened.read_text()}")
        sync(descriptor)

    def log_move(source: Path, target: Path) -> None:
        events.append("replaced")
        move(source, target)

    monkeypatch.setattr(os, "fsync", log_sync)
    monkeypatch.setattr(os, "replace", log_move)
    write_atomically(tmp_path / "file", "new")
    assert events[:2] == ["on disk: new", "replaced"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """On a full disk the error has no file name; it gets that of the file."""
    path = tmp_path / "file"
    write_atomically(path, "old")

    def write_half(target: Path) -> None:
        with atomic_file(target) as file:
            file.write(b"half")
            raise OSError(28, "No space left on device")

    for target in (path, tmp_path / "new"):
        with pytest.raises(OSError, match="No space left") as error:
            write_half(target)
        assert error.value.filename == str(target)
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["file"]


def test_links_stay_and_their_targets_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "target").write_text("old")
    (tmp_path / "link").symlink_to("run/target")
    (tmp_path / "outer").symlink_to("link")
    before = (tmp_path / "run" / "target").stat().st_ino
    write_atomically(tmp_path / "outer", "new")
    assert (tmp_path / "outer").readlink() == Path("link")
    assert (tmp_path / "link").readlink() == Path("run/target")
    assert (tmp_path / "run" / "target").read_text() == "new"
    # Replaced, not written into.
    assert (tmp_path / "run" / "target").stat().st_ino != before
    (tmp_path / "early").symlink_to("later/target")
    write_atomically(tmp_path / "early", "made")
    assert (tmp_path / "later" / "target").read_text() == "made"
    assert (tmp_path / "early").is_symlink()
    assert names_in(tmp_path / "run") == ["target"]


def test_a_link_in_the_place_of_the_unfinished_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where its name was foreseen, which has 64 random bits."""
    names = []
    for _ in range(2):
        with atomic_file(tmp_path / "file"):
            names += [name for name in names_in(tmp_path) if name != "file"]
    assert len(set(names)) == 2
    monkeypatch.setattr("trimtab.files.secrets.token_hex", lambda size: "foreseen")
    (tmp_path / "target").write_text("old")
    (tmp_path / ".file.foreseen.partial").symlink_to("target")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "target").read_text() == "old"


def test_a_pipe_gets_the_content_and_stays(tmp_path: Path, trace: RoutingTrace) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with reading(pipe) as content:
            write_json(path, {"a": 1})
        assert [json.loads(each) for each in content] == [{"a": 1}]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert names_in(tmp_path) == ["link", "pipe"]


def test_devices_are_written_into(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_bytes(b"")
    except PermissionError:
        pytest.skip("devices can't be made here")
    write_atomically(device, "lost")
    status = device.stat()
    assert (stat.S_ISCHR(status.st_mode), status.st_rdev) == (True, os.makedev(1, 3))
    assert names_in(tmp_path) == ["null"]
    # A full disk is reported, with the device's name.
    full = tmp_path / "full"
    os.mknod(full, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
    with pytest.raises(OSError, match="No space left") as error:
        write_atomically(full, "no room")
    assert error.value.filename == str(full)


def test_an_open_file_continues_where_it_is(tmp_path: Path) -> None:
    """As with `trimtab ... --json /dev/stdout > file`."""
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as file:
        file.write(b"before, ")
        number = file.fileno()
        write_atomically(f"/dev/fd/{number}", "inside, ")
        (tmp_path / "link").symlink_to(f"/proc/self/fd/{number}")
        write_atomically(tmp_path / "link", "by a link, ")
        file.write(b"after")
    assert path.read_text() == "before, inside, by a link, after"


def test_folders_block_devices_and_sockets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    with socket.socket(socket.AF_UNIX) as listener:
        # Names of sockets are short.
        monkeypatch.chdir(tmp_path)
        listener.bind("socket")
        refused = {"folder": "a folder", "link": "a folder", "socket": "a socket"}
        try:
            os.mknod(tmp_path / "disk", 0o600 | stat.S_IFBLK, os.makedev(60, 0))
            refused["disk"] = "a block device"
        except PermissionError:
            pass
        for name, kind in refused.items():
            with pytest.raises(InputError, match=rf"{name}: {kind}; name the file to write"):
                write_atomically(tmp_path / name, "content")
    assert names_in(tmp_path) == sorted(refused)


def test_commands_write_into_pipes(tmp_path: Path, trace: RoutingTrace, capsys: pytest.CaptureFixture[str]) -> None:
    file, pipe = str(tmp_path / "trace.parquet"), tmp_path / "pipe"
    write_trace(trace, file)
    os.mkfifo(pipe)
    with reading(pipe) as content:
        assert main(["trace", "info", file, "--json", str(pipe)]) == 0
    assert json.loads(content[0])["tokens"] == 8
    with reading(pipe) as content:
        assert main(["trace", "export", file, "--to", "megatron", "-o", str(pipe)]) == 0
    assert b"top_indices" in content[0]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "again").symlink_to("page")
    capsys.readouterr()
    for words, message in (
        (["trace", "info", file, "--json", str(tmp_path / "link")], "a folder; name the file to write"),
        (["trace", "info", file, "--json", str(tmp_path / "loop")], "symbolic links"),
        # A link and its target are one output.
        (["analyze", file, "--json", str(tmp_path / "page"), "--html", str(tmp_path / "again")], "written twice"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
