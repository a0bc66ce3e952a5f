"""Process from which sandboxed programs are forked, and what happens around one of them.

It starts once, builds an empty file system with Python and the system's libraries read-only, and moves into it. Each
program gets a fork in new namespaces: processes, network, mounts, host name, IPC. It runs as nobody, without
capabilities, under limits and a filter of system calls; a process that it cannot touch waits for it. A few of these
stand ready, so that a call waits for none of it.
"""

import atexit
import contextlib
import errno
import gc
import glob
import json
import os
import resource
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from tilth.process.frames import frame, read_frame
from tilth.sandbox import kernel

ROOTS = ("/mnt", "/media", "/srv", "/opt", "/var", "/tmp", "/home")
"""Folders in which the empty file system may be built: it hides one of them."""
NOBODY = 65534
FIRST_USER = 0x70000000
"""Users of programs count up from here by the number of a process: the kernel counts the processes of a user, so that
programs under one user would use up each other's limit."""
SHARED = ("/usr", "/bin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/etc/localtime")
PACKAGES = "lib*/python3*/*-packages"
HIDDEN = ("/usr/src", "/usr/local/src", f"/usr/{PACKAGES}", f"/usr/local/{PACKAGES}")
"""Folders below them that no program sees: installed packages, Tilth's rewards among them, and sources."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
WORK = "/work"
FOLDERS = {WORK: "mode=777", "/tmp": "mode=1777", "/dev/shm": "mode=1777"}
"""Folders that each program may write to, and that no other one sees."""
LINKS = ("/app", "/workspace", "/tests", "/logs")
"""Links to folders of their names in /work, for programs that are written for a container."""
INODES = 4096
"""Most files and folders in each of them: an empty one takes memory too."""
MEMORY = 78
"""Exit code in the outcome of a program that ran out of memory."""
OUT_OF_MEMORY = signal.SIGRTMAX
"""Signal by which such a program ends, since an exit code may be any program's own."""
BROKEN: Mapping[int, str] = {OUT_OF_MEMORY: "memory", signal.SIGXCPU: "cpu", signal.SIGXFSZ: "file"}
"""Signal that ended a program -> the limit that it broke."""
READY = 2
"""Forks that stand ready for programs to come."""
PRELOAD = (
    "collections", "functools", "itertools", "math", "cmath", "random", "re", "string", "typing", "unittest", "heapq",
    "bisect", "datetime", "decimal", "fractions", "statistics", "ast",
)  # fmt: skip
"""Modules that programs often import, and that tests may name without an import of their own."""


def main(door: int) -> None:
    """Serve requests, each a socket received over ``door``, until the other end is closed."""
    parent = socket.socket(fileno=door)  # its end tells that the other side died; a death signal would follow a thread
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for name in PRELOAD:
        __import__(name)
    try:
        _enter()
        parent.sendall(b"\0")
    except (OSError, kernel.SandboxError) as error:
        parent.sendall(b"\1" + str(error).encode())
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "tilth"]:
        del sys.modules[name]  # no program imports what is not there
    sys.orig_argv[:] = ["python3", "program.py"]
    gc.freeze()
    _serve(parent)


def _serve(door: socket.socket) -> None:
    """Keep forks ready, each of which takes one request from the door, until its other end is closed. One that dies
    while it waits has a successor."""
    taken, take = os.pipe()
    poll = select.poll()
    poll.register(taken, select.POLLIN)
    poll.register(door, 0)  # only its end is heard of: requests are for the forks
    waiting: dict[int, int] = {}  # pidfd -> process
    while True:
        while len(waiting) < READY:
            if (pid := os.fork()) == 0:
                os.close(taken)
                _answer(door, take)
            with contextlib.suppress(ProcessLookupError):  # it has died already
                waiting[found := os.pidfd_open(pid)] = pid
                poll.register(found, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        if door.fileno() in ready:
            return
        began = _began(taken) if taken in ready else ()
        for fd in [fd for fd, pid in waiting.items() if fd in ready or pid in began]:
            poll.unregister(fd)
            os.close(fd)
            del waiting[fd]


def _began(taken: int) -> Sequence[int]:
    """Read the forks that have taken a request."""
    size = struct.calcsize("i")
    return [number for (number,) in struct.iter_unpack("i", os.read(taken, size * READY))]


def _enter() -> None:
    """Build the file system of all sandboxes, once, and move into it."""
    user, group = os.geteuid(), os.getegid()
    if user:
        kernel.unshare(kernel.NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    kernel.unshare(kernel.NEWNS)
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    places = [*SHARED, sys.base_prefix, *(path for path in sys.path if "zip" not in path and os.path.isdir(path))]
    opened = [(path, os.path.realpath(path)) for path in dict.fromkeys(places) if os.path.exists(path)]
    root = _root([path for path, _ in opened])
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    bound = list[str]()
    for path, real in sorted(opened, key=lambda pair: len(pair[0])):
        if any(path.startswith(f"{other}/") for other in bound) or not path.startswith("/"):
            continue
        if os.path.islink(path) and real.startswith("/usr/"):
            os.makedirs(os.path.dirname(f"{root}{path}"), exist_ok=True)
            os.symlink(os.readlink(path), f"{root}{path}")
            continue
        _place(f"{root}{path}", os.path.isdir(path))
        kernel.bind(path, f"{root}{path}")
        bound.append(path)
    for device in DEVICES:
        _place(f"{root}{device}", False)
        kernel.mount(device, f"{root}{device}", "", kernel.MS_BIND)
    for folder in ("/proc", *FOLDERS):
        os.makedirs(f"{root}{folder}", exist_ok=True)
    for link in LINKS:
        if not os.path.lexists(f"{root}{link}"):
            os.symlink(f"{WORK[1:]}{link}", f"{root}{link}")
    # A user who is not root may mount a proc only where he sees one; that of each program covers this one.
    kernel.mount("/proc", f"{root}/proc", "", kernel.MS_BIND | kernel.MS_REC)
    kernel.pivot_root(root)
    kernel.mount(
        "", "/", "", kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m"
    )
    own = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # Tilth's, wherever that is
    for place in (*HIDDEN, f"{glob.escape(sys.base_prefix)}/{PACKAGES}", glob.escape(own)):
        for path in filter(os.path.isdir, glob.glob(place)):
            kernel.mount("tmpfs", path, "tmpfs", kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV, "mode=555")


def _root(sources: list[str]) -> str:
    """Return a folder that holds nothing of what is to be seen."""
    for folder in ROOTS:
        if os.path.isdir(folder) and not any(f"{path}/".startswith(f"{folder}/") for path in sources):
            return folder
    raise kernel.SandboxError(f"each of {', '.join(ROOTS)} is missing or holds a part of Python", key="sandbox.root")


def _place(place: str, folder: bool) -> None:
    """Make an empty place to mount on."""
    os.makedirs(place if folder else os.path.dirname(place), exist_ok=True)
    if not folder:
        open(place, "x").close()


class Prepared(NamedTuple):
    """Namespaces in which a program can begin at once: their process 1, pipes to and from the program, the pipe that
    says how it ended, and the one that takes what to run."""

    first: int
    stdin: int
    stdout: int
    stderr: int
    ended: int
    request: int


def _answer(door: socket.socket, take: int) -> NoReturn:
    """Prepare for a program, take a request, run its program, and answer with its outcome."""
    kernel.prctl(kernel.SET_PDEATHSIG, signal.SIGKILL)  # with the first process, and so with who asked
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 0
    try:
        ended = -1
        try:
            prepared = _prepare()
            ended = prepared.ended
        finally:  # a request that comes is taken all the same, so that who asked hears of the failure
            taken = _take(door, ended)
            os.write(take, struct.pack("i", os.getpid()))
            door.close()
        with socket.socket(fileno=taken) as guest, guest.makefile("rb") as requests:
            if (body := read_frame(requests)) is None:
                os._exit(0)
            guest.sendall(frame(json.dumps(_run(prepared, json.loads(body), body)).encode()))
    except BaseException:  # noqa: BLE001 - a fork must not return into the loop
        traceback.print_exc()
        code = 1
    os._exit(code)


def _take(door: socket.socket, ended: int) -> int:
    """Wait for a request and return its socket. Ends this process if process 1 has ended, which holds the other end of
    ``ended``, or if the door is closed."""
    poll = select.poll()
    poll.register(door, select.POLLIN)
    if ended >= 0:
        poll.register(ended, select.POLLIN)
    while True:
        if any(fd == ended for fd, _ in poll.poll()):
            os._exit(1)
        with contextlib.suppress(BlockingIOError):  # another fork took it
            _, fds, _, _ = socket.recv_fds(door, 1, 1, socket.MSG_DONTWAIT)
            if not fds:
                os._exit(0)
            return fds[0]


def _prepare() -> Prepared:
    """Make namespaces, with a process in them that waits for what to run."""
    kernel.unshare(kernel.NEWPID | kernel.NEWNET | kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS)
    (read, stdin), (stdout, out), (stderr, err), (ended, alive), (asked, request) = (os.pipe() for _ in range(5))
    user = FIRST_USER + os.getpid()
    first = os.fork()  # process 1 of its namespace: when it ends, all others in there are killed
    if first == 0:
        for fd in (stdin, stdout, stderr, ended, request):
            os.close(fd)  # a second holder of stdin would keep its end from the program
        _first(asked, alive, [read, out, err], user)
    for fd in (read, out, err, alive, asked):
        os.close(fd)
    return Prepared(first, stdin, stdout, stderr, ended, request)


def _run(to: Prepared, request: dict[str, Any], body: bytes) -> dict[str, Any]:
    """Run one program in namespaces of its own and watch it. body: the request as it came."""
    began = time.monotonic()
    with open(to.request, "wb") as file:
        file.write(body)
    kept, limit = _watch(to, request["stdin"].encode(), request["limits"], began)
    if limit:
        os.kill(to.first, signal.SIGKILL)
    elif not kept[to.ended]:  # process 1 was killed from outside: nothing is known of the program
        os._exit(1)
    _, _, used = os.wait4(to.first, 0)
    seconds, cpu = time.monotonic() - began, used.ru_utime + used.ru_stime
    status = struct.unpack("i", kept.pop(to.ended) or struct.pack("i", signal.SIGKILL))[0]
    return _outcome(os.waitstatus_to_exitcode(status), limit, list(kept.values())) | {"seconds": seconds, "cpu": cpu}


def _watch(to: Prepared, said: bytes, limits: dict[str, Any], began: float) -> tuple[dict[int, bytearray], str]:
    """Feed the program and read what it prints; return what came from each pipe, and the limit that it broke. Process 1
    holds the other end of ``ended`` until its own end, whatever the program does with its descriptors."""
    kept = {to.stdout: bytearray(), to.stderr: bytearray(), to.ended: bytearray()}
    for fd in (to.stdin, *kept):
        os.set_blocking(fd, False)
    with selectors.DefaultSelector() as selector:
        for fd in kept:
            selector.register(fd, selectors.EVENT_READ)
        if said:
            selector.register(to.stdin, selectors.EVENT_WRITE)
        else:
            os.close(to.stdin)
        while any(fd in selector.get_map() for fd in kept):
            left = began + limits["seconds"] - time.monotonic()
            ready = selector.select(max(0.0, left))
            if not ready and left <= 0:
                return kept, "seconds"
            for key, _ in ready:
                fd = key.fd
                if fd == to.stdin:
                    with contextlib.suppress(BlockingIOError):
                        try:
                            said = said[os.write(fd, said) :]
                        except BrokenPipeError:
                            said = b""
                    if not said:
                        selector.unregister(fd)
                        os.close(fd)
                    continue
                part = os.read(fd, 1 << 16)
                if part:
                    kept[fd] += part
                else:
                    selector.unregister(fd)
                if len(kept[to.stdout]) + len(kept[to.stderr]) > limits["output"]:
                    return kept, "output"
    return kept, ""


def _outcome(code: int, limit: str, printed: Sequence[bytearray]) -> dict[str, Any]:
    """Return what became of a program. code: its exit code, or -N after signal N."""
    limit = limit or BROKEN.get(-code, "")
    stdout, stderr = (part.decode(errors="replace") for part in printed)
    shown = MEMORY if limit == "memory" else 128 - code if code < 0 else code
    state = (limit and "limit") or ("ok" if code == 0 else "error")
    return {"state": state, "limit": limit, "code": shown, "stdout": stdout, "stderr": stderr}


def _first(asked: int, alive: int, fds: list[int], user: int) -> NoReturn:
    """Be process 1: mount what belongs to this program alone, start it as nobody, wait for it, say how it ended."""
    status = 1 << 8
    try:
        kernel.prctl(kernel.SET_PDEATHSIG, signal.SIGKILL)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        for folder, mode in FOLDERS.items():
            kernel.mount("tmpfs", folder, "tmpfs", flags, f"{mode},nr_inodes={INODES}")
        kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC, "hidepid=2,subset=pid")
        kernel.call("sethostname", b"sandbox", 7)
        source, begin = os.pipe()
        child = os.fork()
        if child == 0:
            _program([*fds, source], user)
        for fd in (fds[0], fds[1], source):
            os.close(fd)
        with open(asked, "rb") as file:
            body = file.read()
        if not body:  # its fork died, perhaps before this process could ask to die with it
            os._exit(1)
        request = json.loads(body)
        for folder, mode in FOLDERS.items():
            options = f"{mode},size={request['limits']['files']}"
            kernel.mount("tmpfs", folder, "tmpfs", flags | kernel.MS_REMOUNT, options)
        _write_files(request["files"])
        kernel.prctl(kernel.SET_DUMPABLE, 0)
        with open(begin, "w") as file:
            json.dump({"program": request["program"], "limits": request["limits"]}, file)
        status = _wait(child)
    except BaseException:  # noqa: BLE001 - told as the program's error
        with contextlib.suppress(BrokenPipeError):
            os.write(fds[2], traceback.format_exc().encode())
    finally:  # whatever happens, it must not go on as the fork that it was
        with contextlib.suppress(BrokenPipeError):
            os.write(alive, struct.pack("i", status))
        os._exit(0)


def _write_files(files: Mapping[str, str]) -> None:
    for name, text in files.items():
        place = os.path.normpath(os.path.join(WORK, name))
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w") as file:
            file.write(text)
        os.chmod(place, 0o666)


def _wait(child: int) -> int:
    """Reap all processes until the program itself ends; return its status."""
    while True:
        found, status = os.wait()
        if found == child:
            return status


def _program(fds: list[int], user: int) -> NoReturn:
    """Give everything up, then execute the program that comes in this process. fds: stdin, stdout, stderr, and the
    pipe that it comes through."""
    for place, fd in enumerate(fds):
        os.dup2(fd, place)
    os.closerange(len(fds), 1 << 16)
    _become_nobody(user)
    kernel.drop_capabilities()
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ |= {"HOME": WORK, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    os.chdir(WORK)
    os.umask(0o022)
    kernel.restrict_calls()
    with open(len(fds) - 1) as file:
        asked = json.load(file)
    _limit(asked["limits"])
    code = _execute(asked["program"])
    if code is None:
        os.kill(os.getpid(), OUT_OF_MEMORY)
    os._exit(code or 0)


def _become_nobody(user: int) -> None:
    """Become a user whose processes the kernel counts apart from those of other programs."""
    try:
        os.setgroups([])
    except PermissionError:  # without root there is one user, whose processes are counted by namespace (Linux 5.14)
        kernel.unshare(kernel.NEWUSER)
        kernel.bound_capabilities()
        return
    kernel.bound_capabilities()
    os.setresgid(NOBODY, NOBODY, NOBODY)
    try:
        os.setresuid(user, user, user)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a container that has a few users only
            raise
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _limit(limits: dict[str, Any]) -> None:
    """Set the limits of the program's processes."""
    seconds = max(1, round(limits["cpu"]))
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["files"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(what, (most, most + (what == resource.RLIMIT_CPU)))


def _execute(source: str) -> int | None:
    """Execute Python source as ``__main__``; return its exit code, None: it ran out of memory."""
    sys.argv, sys.path[:] = ["program.py"], [WORK, *(path for path in sys.path if "site-packages" not in path)]
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        setattr(sys, name, open(number, mode, encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115
    main = sys.modules["__main__"] = ModuleType("__main__")  # where pickle and unittest look for the program's classes
    main.__file__ = "program.py"
    code: int | None = 0
    try:
        exec(compile(source, "program.py", "exec"), main.__dict__)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except MemoryError:
        code = None
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does: threads that are no daemons end first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return None if code is None else code & 0xFF
