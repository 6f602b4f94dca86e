"""Writes are complete or do not happen, and replace nothing but regular files."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from trimtab import InputError, write_trace
from trimtab.cli.main import main
from trimtab.files import atomic_file, write_atomically, write_json
from trimtab.trace import synthesize
from trimtab.trace.exports.arrays import write_npz


def read_from(pipe: Path) -> tuple[threading.Thread, list[bytes]]:
    """A thread that reads all that is written into a pipe, and what it has read."""
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    thread.start()
    return thread, found


def test_the_old_content_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_atomically(path, "old\n")
    with atomic_file(path) as file:
        file.write(b"first part, ")
        file.flush()
        assert path.read_text() == "old\n"
        file.write(b"second part")
    assert path.read_text() == "first part, second part"
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(target: Path) -> None:
        with atomic_file(target) as file:
            file.write(b"half")
            raise RuntimeError("stopped")

    for target in (path, tmp_path / "new"):
        with pytest.raises(RuntimeError, match="stopped"):
            fail(target)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_an_error_without_a_name_gets_that_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as error, atomic_file(tmp_path / "file"):
        raise OSError(28, "No space left on device")
    assert error.value.filename == str(tmp_path / "file")


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
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["target"]


def test_a_pipe_gets_the_content_and_stays(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        thread, found = read_from(pipe)
        write_json(path, {"a": 1})
        thread.join(10)
        assert [json.loads(each) for each in found] == [{"a": 1}]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    # Archives are written by seeking.
    trace = synthesize(num_sequences=2, sequence_length=4, num_layers=1, num_experts=8, top_k=2, zipf=1.0)
    thread, found = read_from(pipe)
    write_npz(trace, pipe)
    thread.join(10)
    with np.load(BytesIO(found[0])) as arrays:
        assert np.array_equal(arrays["expert_ids"], trace.expert_ids)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "pipe"]


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
    assert [each.name for each in tmp_path.iterdir()] == ["null"]
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
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(refused)


def test_commands_write_into_pipes_and_refuse_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = synthesize(num_sequences=2, sequence_length=4, num_layers=1, num_experts=8, top_k=2, zipf=1.0)
    write_trace(trace, tmp_path / "trace.parquet")
    os.mkfifo(tmp_path / "pipe")
    thread, found = read_from(tmp_path / "pipe")
    words = ["trace", "info", str(tmp_path / "trace.parquet"), "--json"]
    assert main([*words, str(tmp_path / "pipe")]) == 0
    thread.join(10)
    assert json.loads(found[0])["tokens"] == 8
    thread, found = read_from(tmp_path / "pipe")
    assert main(["trace", "export", words[2], "--to", "safetensors", "-o", str(tmp_path / "pipe")]) == 0
    thread.join(10)
    assert b"expert_ids" in found[0]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    capsys.readouterr()
    (tmp_path / "link").symlink_to(tmp_path)
    for name, message in (("link", "a folder; name the file to write"), ("loop", "symbolic links")):
        (tmp_path / "loop").unlink(missing_ok=True)
        (tmp_path / "loop").symlink_to("loop")
        assert main([*words, str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_link_and_its_target_are_one_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = synthesize(num_sequences=2, sequence_length=4, num_layers=1, num_experts=8, top_k=2, zipf=1.0)
    write_trace(trace, tmp_path / "trace.parquet")
    (tmp_path / "link").symlink_to("page")
    outputs = ["--json", str(tmp_path / "page"), "--html", str(tmp_path / "link")]
    assert main(["analyze", str(tmp_path / "trace.parquet"), *outputs]) == 2
    assert "to be written twice" in capsys.readouterr().err
