"""The files that a request writes: checked before any work is done, and given their names when they are complete.

1. No output is an input, or another output, under any name: compared by identity where both exist, else by the path
   with all links followed.
2. A symbolic link stays; the file it leads to is written. A pipe or a character device (/dev/null, /dev/stdout) is
   written to, never replaced, and needs no `force`. Block devices, sockets and terminals are refused.
3. A regular file is made in a scratch directory beside its place and renamed. Without `force` that fails if a file has
   come to that place meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lsuv_cli import temporary
from lsuv_cli.errors import LsuvError, OutputError
from lsuv_cli.scratch import Scratch

StrPath = str | os.PathLike[str]

DATA_SUFFIX = ".data"  # of the file with a model's weights, beside it
DESCRIPTORS = ("/dev/fd", "/proc/self/fd")
CHUNK = 1 << 22  # bytes that are sent to a stream at a time
LINKS = 40  # symbolic links in a row, as many as Linux follows
RENAME_NOREPLACE = 1
AT_FDCWD = -100
PATIENCE = 10.0  # seconds in which another run will have renamed its two files


@dataclass(frozen=True)
class Target:
    """A file to be written, checked. `place` is the path with links followed; a stream is written to as it is."""

    option: str
    given: Path
    place: Path
    stream: bool = False
    force: bool = False

    def with_suffix(self, suffix: str) -> Target:
        """The target of a file that goes beside this one."""
        given, place = (path.with_name(path.name + suffix) for path in (self.given, self.place))
        return replace(self, given=given, place=place)

    def publish(self, made: Path) -> None:
        """Give a finished file on the same file system its name."""
        try:
            if self.force:
                made.replace(self.place)
            else:
                _rename_to_new(made, self.place)
        except FileExistsError:
            raise OutputError(
                f"{self.given} has come into being during the run and was left alone; use `force=True` to overwrite it "
                f"or choose another {self.option}"
            ) from None
        except OSError as problem:
            raise self.failure(problem) from None

    def send(self, chunks: Iterable[bytes | memoryview]) -> None:
        """Write to a stream."""
        try:
            with self.place.open("wb") as stream:
                stream.writelines(chunks)
        except OSError as problem:
            raise self.failure(problem) from None

    def deliver(self, made: Path) -> None:
        """Publish a finished file, or send it to a stream."""
        if self.stream:
            with made.open("rb") as file:
                self.send(iter(lambda: file.read(CHUNK), b""))
        else:
            self.publish(made)

    def failure(self, problem: OSError) -> OutputError:
        """The error for a target that the system refuses to write."""
        return OutputError(f"{self.given} cannot be written: {problem.strerror or problem}; nothing was changed")


def check(
    wanted: Mapping[str, StrPath | None],
    inputs: Iterable[StrPath],
    *,
    force: bool = False,
    drawn: Mapping[str, StrPath] | None = None,
    data_beside: str = "",
) -> dict[str, Target]:
    """The targets of a request by their options. Refuses what would destroy something or cannot be written.

    Files that are only `drawn` (plots of a report) are overwritten without being asked. `data_beside` is the option
    of a model whose weights go to a file of their own beside it.
    """
    targets = {option: _target(option, path, force) for option, path in wanted.items() if path is not None}
    targets |= {option: _target(option, path, True) for option, path in (drawn or {}).items()}
    written = list(targets.values())
    if data_beside in targets and not targets[data_beside].stream:
        model = targets[data_beside]
        if not is_same(model.place.parent, absolute(model.given).parent):
            raise OutputError(
                f"{model.given} is a symbolic link to another directory, and the weights, which go to a file beside "
                f"the model, would not be found through it; give {data_beside} {model.place}"
            )
        written.append(model.with_suffix(DATA_SUFFIX))
    for target in written:
        _check_name(target)
    check_apart(written, inputs)
    for target in written:
        _check_new(target)
    return targets


def check_apart(targets: Sequence[Target], inputs: Iterable[StrPath]) -> None:
    """No target may be an input, lie among the files of an input directory, or be another target."""
    for source in map(Path, inputs):
        for target in targets:
            if is_same(target.place, source):
                raise OutputError(f"{target.given} is the input itself ({source}); choose another {target.option}")
            if target.place.exists() and _within(target.place, source):
                raise OutputError(f"{target.given} is among the data in {source}; choose another {target.option}")
    for k, target in enumerate(targets):
        for other in targets[:k]:
            if is_same(target.place, other.place):
                options = f"{other.option} and {target.option}"
                raise OutputError(f"{options} are the same file ({target.given}); choose another for one of them")


def _check_name(target: Target) -> None:
    """The target's name must be possible."""
    parent = target.place.parent
    with contextlib.suppress(AttributeError, OSError, ValueError):  # Windows; file systems that do not tell
        most, length = os.pathconf(parent, "PC_NAME_MAX"), len(os.fsencode(target.place.name))
        if length > most:
            raise OutputError(
                f"{target.option}: the file name {target.place.name[:20]}... has {length} bytes, at most {most} are "
                f"possible in {parent}; choose a shorter one"
            )


def _check_new(target: Target) -> None:
    """The target's name must be free, or may be overwritten."""
    if target.stream:
        return
    parent = target.place.parent
    if target.place.exists() and not target.force:
        raise OutputError(f"{target.given} exists; use `force=True` to overwrite it or choose another {target.option}")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{parent} is not writable; choose another {target.option}")


@contextlib.contextmanager
def growing(target: Target) -> Iterator[Path]:
    """A path to write to, gone when the context ends if it was not delivered."""
    import tempfile

    try:
        with Scratch(Path(tempfile.gettempdir()) if target.stream else target.place.parent) as scratch:
            yield scratch.path / (target.given if target.stream else target.place).name
    except OSError as problem:
        raise target.failure(problem) from None


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Let one process at a time rename results into a directory, so that model and data belong together.

    A lock that is held longer than PATIENCE is another program's (`flock DIR lsuv ...`): then go on without it.
    """
    try:
        import fcntl

        handle = os.open(directory, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        last = time.monotonic() + PATIENCE
        with contextlib.suppress(OSError):  # a file system without locks
            while time.monotonic() < last:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def publish(target: Target, model: Path, data: Path | None) -> None:
    """Give a finished model its name, and the file of its weights, if it has one, the name beside it."""
    if data is None:
        target.publish(model)
        return
    beside = target.with_suffix(DATA_SUFFIX)
    with alone_in(target.place.parent):
        if target.force:
            # The old model beside the new data file would be a wrong model, so the old model is removed first.
            with contextlib.suppress(OSError):  # the rename below then fails too, and says why
                target.place.unlink(missing_ok=True)
        beside.publish(data)
        temporary.announce(beside.place)  # a data file without its model is useless
        try:
            target.publish(model)
        except BaseException:  # an interruption too must not leave the data without its model
            beside.place.unlink(missing_ok=True)
            raise
        finally:
            temporary.withdraw(beside.place)


@contextlib.contextmanager
def directory(path: Path) -> Iterator[None]:
    """Make a directory for outputs, with its parents. What was made here and stays empty goes when the context ends.

    A scratch directory in it keeps another run, which made the directory, from taking it away meanwhile.
    """
    new = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(new):
        temporary.announce(each, if_empty=True)
    try:
        with contextlib.ExitStack() as held:
            path.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # what is wrong with the directory is told when a file is made there
                held.enter_context(Scratch(path))
            yield
    finally:
        for each in new:
            with contextlib.suppress(OSError):  # it has files, or was not made
                each.rmdir()
            temporary.withdraw(each, if_empty=True)


def absolute(path: StrPath) -> Path:
    """A path that does not depend on the working directory, which may be gone."""
    try:
        return Path(path).absolute()
    except OSError as problem:
        raise LsuvError(
            f"{path} is relative to a working directory that is gone ({problem.strerror}); "
            "change to another directory, or give absolute paths"
        ) from None


def _target(option: str, path: StrPath, force: bool) -> Target:
    given = Path(path)
    if os.fspath(path).endswith(("/", os.sep)):
        raise OutputError(f"{path} is meant as a directory; give a file name with {option}")
    try:
        descriptor = _descriptor(absolute(given))
        if descriptor is not None:
            if descriptor == "2":
                raise OutputError(f"{option} {given}: standard error is for messages; choose another {option}")
            return Target(option, given, absolute(given), stream=True, force=force)
        place = Path(os.path.realpath(absolute(given)))
        try:
            mode = place.stat().st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG
        if not place.parent.is_dir():
            raise OutputError(f"{option} {given}: {place.parent} is not a directory; make it first")
    except (OSError, ValueError) as problem:  # a name too long, a loop of links, a NUL
        reason = getattr(problem, "strerror", None) or problem
        raise OutputError(f"{option} {given}: {reason}; choose another {option}") from None
    if stat.S_ISREG(mode):
        return Target(option, given, place, force=force)
    if stat.S_ISDIR(mode):
        raise OutputError(f"{given} is a directory; give a file name with {option}")
    if stat.S_ISCHR(mode):
        _check_device(option, given, place)
    elif not stat.S_ISFIFO(mode):
        raise OutputError(f"{given} is a block device or a socket, which is left alone; choose another {option}")
    return Target(option, given, place, stream=True, force=force)


def _check_device(option: str, given: Path, place: Path) -> None:
    try:
        handle = os.open(place, os.O_WRONLY | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as problem:
        raise OutputError(f"{given} cannot be written: {problem.strerror}; choose another {option}") from None
    terminal = os.isatty(handle)
    os.close(handle)
    if terminal:
        raise OutputError(f"{given} is a terminal, which this is not for; choose another {option}")


def _descriptor(path: Path) -> str | None:
    """The number of the open file that a path such as /dev/stdout means, if it is one."""
    for _ in range(LINKS):
        if str(path.parent) in DESCRIPTORS:
            return path.name
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None


def is_same(one: Path, other: Path) -> bool:
    """Whether two paths are one file or directory, or will be once it is made."""
    with contextlib.suppress(OSError, ValueError):
        if stat.S_ISCHR(one.stat().st_mode):  # /dev/null may be input and output at once
            return False
        return one.samefile(other)
    with contextlib.suppress(OSError, ValueError):
        return os.path.normcase(os.path.realpath(one)) == os.path.normcase(os.path.realpath(other))
    return False


def _within(path: Path, directory: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):  # a name that cannot be
        if not directory.is_dir():
            return False
    return any(is_same(parent, directory) for parent in path.parents)


def _rename_to_new(made: Path, place: Path) -> None:
    """Rename a file; FileExistsError if the new name is taken. Atomic wherever the system allows it."""
    if os.name == "nt":
        made.rename(place)  # on Windows rename fails if the name is taken
        return
    if sys.platform == "linux" and _renamed_by_linux(made, place):
        return
    try:
        os.link(made, place)
    except FileExistsError:
        raise
    except OSError:
        # A file system with neither: an empty file holds the name for the instant until it is replaced.
        os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        made.replace(place)
        return
    made.unlink()


def _renamed_by_linux(made: Path, place: Path) -> bool:
    """renameat2 with RENAME_NOREPLACE; False if the C library or the file system does not have it."""
    import ctypes

    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if rename(AT_FDCWD, os.fsencode(made), AT_FDCWD, os.fsencode(place), RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(place))
