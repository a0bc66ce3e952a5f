"""System calls of a sandbox, by ctypes: namespaces, mounts, capabilities, a seccomp filter. Linux only; no library."""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Mapping, Sequence

from tilth.core.errors import TilthError

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE, MNT_DETACH, AT_RECURSIVE = 1 << 18, 2, 0x8000
NO_NEW_PRIVS, SET_SECCOMP, SET_DUMPABLE, SET_PDEATHSIG, CAPBSET_DROP = 38, 22, 4, 1, 24
LAST_CAPABILITY = 40

# (x86_64, aarch64)
CALLS: Mapping[str, tuple[int, int]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280),
    "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "userfaultfd": (323, 282), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "personality": (135, 92), "quotactl": (179, 60), "acct": (163, 89), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161),
    "setdomainname": (171, 162), "syslog": (103, 116), "lookup_dcookie": (212, 18), "vhangup": (153, 58),
    "socket": (41, 198), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "memfd_secret": (447, 447), "landlock_create_ruleset": (444, 444), "memfd_create": (319, 279),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "io_setup": (206, 0), "flock": (73, 32),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262), "vmsplice": (278, 75),
}  # fmt: skip
"""Calls that fail with EPERM: new privileges, other processes, the network, wide interfaces of the kernel, memory that
no limit of a process counts, what the whole host shares, and locks and watches on its files."""
FCNTL = (72, 25)
FCNTL_DENIED = {"SETLK": 6, "SETLKW": 7, "OFD_SETLK": 37, "OFD_SETLKW": 38, "SETLEASE": 1024, "NOTIFY": 1026}
"""Commands of ``fcntl`` that fail with EPERM: other ways to a lock or a watch."""
ONLY_X86 = {"inotify_init": 253}
MISSING: Mapping[str, tuple[int, int]] = {"clone3": (435, 435)}
"""Calls that fail with ENOSYS: their arguments lie in memory, where a filter does not see them; the C library then uses
the older one."""
NEWER = 463
"""Calls from this number on (Linux 6.13) fail with ENOSYS: nobody has looked at what they give away."""
CLONE = (56, 220)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> column of the tables, and its number in seccomp."""
X32 = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


class SandboxError(TilthError):
    """A sandbox cannot be made on this machine."""


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library; OSError if it fails."""
    found = int(getattr(_libc, name)(*arguments))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return found


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    call("unshare", flags)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system."""
    call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


def bind(source: str, target: str) -> None:
    """Mount a folder read-only at another place, with all that is mounted below it, without set-user-id programs."""
    mount(source, target, "", MS_BIND | MS_REC)
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID, 0, 0, 0)  # a remount would change the uppermost one alone
    number = ctypes.c_long(CALLS["mount_setattr"][_machine()[0]])
    call("syscall", number, -1, target.encode(), AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))


def pivot_root(folder: str) -> None:
    """Make a mounted folder the root of this process; what was there before is out of reach."""
    os.chdir(folder)
    call("syscall", (155, 41)[_machine()[0]], b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def bound_capabilities() -> None:
    """Take every capability from programs that are executed later. Needs the capability to do so."""
    for capability in range(LAST_CAPABILITY + 1):
        try:
            call("prctl", CAPBSET_DROP, capability, 0, 0, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a capability that this kernel does not have
                raise


def drop_capabilities() -> None:
    """Give up every capability."""
    call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    call("prctl", option, value, 0, 0, 0)


def restrict_calls() -> None:
    """Install the filter of system calls, for this process and its children, for ever."""
    prctl(NO_NEW_PRIVS, 1)
    program = b"".join(_filter())
    buffer = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    call("prctl", SET_SECCOMP, 2, head, 0, 0)


def _machine() -> tuple[int, int]:
    try:
        return MACHINES[platform.machine()]
    except KeyError:
        message = f"the sandbox knows no system calls of {platform.machine()}; it knows {', '.join(MACHINES)}"
        raise SandboxError(message, key="sandbox.machine") from None


def _filter() -> Sequence[bytes]:
    """Return the BPF program: wrong machine kills, listed and newer calls fail, clone may make no namespace, all others
    go on."""
    column, number = _machine()
    load, equal, above, allowed = 0x20, 0x15, 0x35, 0x7FFF0000
    kill, denied, missing = 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    found = [step(load, 4), step(equal, number, 1, 0), step(0x06, kill), step(load, 0)]
    found += [step(above, X32, 0, 1), step(0x06, kill)] if column == 0 else []
    found += [step(above, NEWER, 0, 1), step(0x06, missing)]
    refused = [(numbers[column], denied) for numbers in CALLS.values()]
    refused += [(numbers[column], missing) for numbers in MISSING.values()]
    refused += [(one, denied) for one in ONLY_X86.values() if column == 0]
    for call_number, answer in refused:
        found += [step(equal, call_number, 0, 1), step(0x06, answer)]
    found += [step(equal, FCNTL[column], 0, 2 + 2 * len(FCNTL_DENIED)), step(load, 24)]  # its second argument
    for command in FCNTL_DENIED.values():
        found += [step(equal, command, 0, 1), step(0x06, denied)]
    found += [step(load, 0)]
    found += [step(equal, CLONE[column], 0, 3), step(load, 16), step(0x45, NAMESPACES, 0, 1), step(0x06, denied)]
    return [*found, step(0x06, allowed)]
