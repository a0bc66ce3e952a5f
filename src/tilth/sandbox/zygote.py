"""Process from which sandboxed programs are forked, and what happens around one of them.

It starts once, builds an empty file system with Python and the system's libraries read-only, and moves into it. Each
request is a fork in new namespaces: processes, network, mounts, host name, IPC. The program runs as nobody, without
capabilities, under limits and a filter of system calls; a process that it cannot touch waits for it.
"""

import atexit
import contextlib
import errno
import gc
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from types import ModuleType
from typing import Any, NoReturn

from tilth.sandbox import kernel

ROOTS = ("/mnt", "/media", "/srv", "/opt", "/var", "/tmp", "/home")
"""Folders in which the empty file system may be built: it hides one of them."""
NOBODY = 65534
FIRST_USER = 0x70000000
"""Users of programs count up from here by the number of a process: the kernel counts the processes of a user, so that
programs under one user would use up each other's limit."""
SHARED = ("/usr", "/bin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
WORK = "/work"
MEMORY = 78
"""Exit code of a program that ran out of memory."""
PRELOAD = (
    "collections",
    "functools",
    "itertools",
    "math",
    "random",
    "re",
    "string",
    "typing",
    "unittest",
    "heapq",
    "bisect",
)


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
    gc.freeze()
    while True:
        message, fds, _, _ = socket.recv_fds(parent, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            parent.close()
            _answer(socket.socket(fileno=fds[0]))
        os.close(fds[0])


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
    for folder in ("/proc", "/tmp", WORK):
        os.makedirs(f"{root}{folder}", exist_ok=True)
    # A user who is not root may mount a proc only where he sees one; that of each program covers this one.
    kernel.mount("/proc", f"{root}/proc", "", kernel.MS_BIND | kernel.MS_REC)
    kernel.pivot_root(root)
    kernel.mount(
        "", "/", "", kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m"
    )


def _root(sources: list[str]) -> str:
    """Return a folder that holds nothing of what is to be seen."""
    for folder in ROOTS:
        if os.path.isdir(folder) and not any(f"{path}/".startswith(f"{folder}/") for path in sources):
            return folder
    message = f"each of {', '.join(ROOTS)} is missing or holds a part of Python"
    raise kernel.SandboxError(message, key="sandbox.root")


def _place(place: str, folder: bool) -> None:
    """Make an empty place to mount on."""
    os.makedirs(place if folder else os.path.dirname(place), exist_ok=True)
    if not folder:
        open(place, "x").close()


def _answer(guest: socket.socket) -> NoReturn:
    """Run the program that a request holds and answer with its outcome."""
    kernel.prctl(kernel.SET_PDEATHSIG, signal.SIGKILL)  # with the first process, and so with who asked
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 0
    try:
        with guest:
            size = struct.unpack("<Q", _exactly(guest, 8))[0]
            request = json.loads(_exactly(guest, size))
            outcome = json.dumps(_run(request)).encode()
            guest.sendall(struct.pack("<Q", len(outcome)) + outcome)
    except BaseException:  # noqa: BLE001 - a fork must not return into the loop
        traceback.print_exc()
        code = 1
    os._exit(code)


def _exactly(guest: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = guest.recv(min(1 << 20, size - len(found)))
        if not part:
            os._exit(0)
        found += part
    return bytes(found)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """Run one program in namespaces of its own and watch it."""
    limits = request["limits"]
    kernel.unshare(kernel.NEWPID | kernel.NEWNET | kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS)
    (read, stdin), (stdout, out), (stderr, err), (ended, alive) = (os.pipe() for _ in range(4))
    began, user = time.monotonic(), FIRST_USER + os.getpid()
    first = os.fork()  # process 1 of its namespace: when it ends, all others in there are killed
    if first == 0:
        for fd in (stdin, stdout, stderr, ended):  # a second holder of stdin would keep its end from the program
            os.close(fd)
        _first(request, [read, out, err], user)
    for fd in (read, out, err, alive):
        os.close(fd)
    kept, limit = _watch(ended, stdin, stdout, stderr, request["stdin"].encode(), limits, began)
    if limit:
        os.kill(first, signal.SIGKILL)
    _, status, used = os.wait4(first, 0)
    return _outcome(status, limit, kept, time.monotonic() - began, used)


def _watch(
    ended: int, stdin: int, stdout: int, stderr: int, said: bytes, limits: dict[str, Any], began: float
) -> tuple[dict[int, bytearray], str]:
    """Feed the program and read what it prints; return that, and the limit that it broke.

    ended: closed at its other end by the end of process 1, whatever the program does with its own descriptors.
    """
    kept = {stdout: bytearray(), stderr: bytearray()}
    for fd in (stdin, stdout, stderr):
        os.set_blocking(fd, False)
    with selectors.DefaultSelector() as selector:
        for fd in (*kept, ended):
            selector.register(fd, selectors.EVENT_READ)
        if said:
            selector.register(stdin, selectors.EVENT_WRITE)
        else:
            os.close(stdin)
        while any(fd in selector.get_map() for fd in (*kept, ended)):
            left = began + limits["seconds"] - time.monotonic()
            ready = selector.select(max(0.0, left))
            if not ready and left <= 0:
                return kept, "seconds"
            for key, _ in ready:
                fd = key.fd
                if fd == stdin:
                    with contextlib.suppress(BlockingIOError):
                        try:
                            said = said[os.write(stdin, said) :]
                        except BrokenPipeError:
                            said = b""
                    if not said:
                        selector.unregister(stdin)
                        os.close(stdin)
                    continue
                part = os.read(fd, 1 << 16)
                if part:
                    kept[fd] += part
                else:
                    selector.unregister(fd)
                if sum(map(len, kept.values())) > limits["output"]:
                    return kept, "output"
    return kept, ""


def _outcome(
    status: int, limit: str, kept: dict[int, bytearray], seconds: float, used: resource.struct_rusage
) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(status)
    code = 128 - code if code < 0 else code
    stdout, stderr = (part.decode(errors="replace") for part in kept.values())
    if not limit:
        limit = {MEMORY: "memory", 128 + signal.SIGXCPU: "cpu", 128 + signal.SIGXFSZ: "file"}.get(code, "")
    state = (limit and "limit") or ("ok" if code == 0 else "error")
    cpu = used.ru_utime + used.ru_stime
    return {
        "state": state, "limit": limit, "code": code, "stdout": stdout, "stderr": stderr, "seconds": seconds, "cpu": cpu
    }  # fmt: skip


def _first(request: dict[str, Any], fds: list[int], user: int) -> NoReturn:
    """Be process 1: mount what belongs to this program alone, start it as nobody, wait for it."""
    code = 1
    try:
        kernel.prctl(kernel.SET_PDEATHSIG, signal.SIGKILL)
        limits, room = request["limits"], f"mode=777,size={request['limits']['files']}"
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        for folder in (WORK, "/tmp"):
            kernel.mount("tmpfs", folder, "tmpfs", flags, room)
        kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC, "hidepid=2")
        kernel.call("sethostname", b"sandbox", 7)
        for name, text in request["files"].items():
            place = os.path.normpath(os.path.join(WORK, name))
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "w") as file:
                file.write(text)
            os.chmod(place, 0o666)
        kernel.prctl(kernel.SET_DUMPABLE, 0)
        child = os.fork()
        if child == 0:
            _program(request["program"], limits, fds, user)
        for fd in fds:
            os.close(fd)
        code = _wait(child)
    except BaseException:  # noqa: BLE001 - told as the program's error
        os.write(fds[2], traceback.format_exc().encode())
    os._exit(code)


def _wait(child: int) -> int:
    """Reap all processes until the program itself ends; return its exit code as a shell tells it."""
    while True:
        found, status = os.wait()
        if found == child:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


def _program(source: str, limits: dict[str, Any], fds: list[int], user: int) -> NoReturn:
    """Give everything up and execute the program in this process."""
    for place, fd in enumerate(fds):
        os.dup2(fd, place)
    os.closerange(3, 1 << 16)
    _limit(limits)
    kernel.bound_capabilities()
    with contextlib.suppress(PermissionError):  # without root, this user is the only one that there is
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        try:
            os.setresuid(user, user, user)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a container that has a few users only
                raise
            os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.drop_capabilities()
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ |= {"HOME": WORK, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    os.chdir(WORK)
    os.umask(0o022)
    kernel.restrict_calls()
    os._exit(_execute(source))


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


def _execute(source: str) -> int:
    """Execute Python source as ``__main__``; return its exit code."""
    sys.argv, sys.path[:] = ["program.py"], [WORK, *(path for path in sys.path if "site-packages" not in path)]
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        setattr(sys, name, open(number, mode, encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115
    main = sys.modules["__main__"] = ModuleType("__main__")  # where pickle and unittest look for the program's classes
    main.__file__ = "program.py"
    code = 0
    try:
        exec(compile(source, "program.py", "exec"), main.__dict__)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except MemoryError:
        code = MEMORY
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does: threads that are no daemons end first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code & 0xFF
