# ruff: noqa: E501
"""Programs that try to get out. Each prints ESCAPED if it does what no sandboxed program may do.

PID, PORT, SECRET, NAME, SHARED and SOURCE stand for a victim's process, a listening port, a file of the host, an abstract
socket, a folder that lives on and that of Tilth.
"""

CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    found = libc.syscall(*arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), "call")
    return found
"""
DONE = "\nprint('ESCAPED')\n"
ESCAPES = {
    # ---- files ----
    "read a file of the host": "assert open('SECRET').read() == 'secret'" + DONE,
    "read a file by a symbolic link": "import os; os.path.lexists('l') or os.symlink('SECRET', 'l'); assert open('l').read() == 'secret'"
    + DONE,
    "list the host's home": "import os; assert os.listdir(os.path.dirname('SECRET'))" + DONE,
    "read the host's users": "assert 'root' in open('/etc/passwd').read()" + DONE,
    "write where programs are": "import os; p = '/usr/lib/tilth-escape'; open(p, 'w').close(); os.remove(p)" + DONE,
    "write beside the folder": "import os; p = '/tilth-escape'; open(p, 'w').close(); os.remove(p)" + DONE,
    "leave a file for the next program": "open('SHARED/left', 'a').write('x'); assert len(open('SHARED/left').read()) > 1"
    + DONE,
    "fill the disk": "open('big', 'wb').write(bytes(64 << 20)); import os; os.remove('big')" + DONE,
    "fill the memory by files": "open('/dev/shm/big', 'wb').write(bytes(64 << 20)); import os; os.remove('/dev/shm/big')"
    + DONE,
    "fill the disk by many files": "for i in range(40): open(f'SHARED/{i}', 'wb').write(bytes(1 << 20))" + DONE,
    "empty files without number": "import os\nfor i in range(5000): open(f'SHARED/{i}', 'w').close()\n"
    "for i in range(5000): os.remove(f'SHARED/{i}')" + DONE,
    "make a device": "import os, stat; os.mknod('SHARED/d', 0o600 | stat.S_IFBLK, os.makedev(7, 0)); os.remove('SHARED/d')"
    + DONE,
    "climb out of a new root": "import os; os.makedirs('r', exist_ok=True); d = os.open('/', 0); os.chroot('r'); os.fchdir(d)"
    + DONE,
    "see the system": "import os; assert os.listdir('/sys/kernel')" + DONE,
    "write a setting of the kernel": "p = '/proc/sys/kernel/domainname'; t = open(p).read(); open(p, 'w').write(t)"
    + DONE,
    # ---- other processes ----
    "see another process": "import os; os.listdir('/proc/PID')" + DONE,
    "read another's environment": "assert open('/proc/PID/environ').read()" + DONE,
    "signal another process": "import os, signal; os.kill(PID, signal.SIGCONT)" + DONE,
    "signal the parent": "import os; assert os.getppid() > 1; os.kill(os.getppid(), 0)" + DONE,
    "trace another process": CALL + "call(101, 0x4206, PID, 0, 0)" + DONE,
    "read another's memory": CALL + "import struct\nline = open('/proc/PID/maps').readline()\n"
    "start = int(line.split('-')[0], 16)\nbuffer = ctypes.create_string_buffer(8)\n"
    "class V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
    "call(310, PID, ctypes.byref(V(ctypes.addressof(buffer), 8)), 1, ctypes.byref(V(start, 8)), 1, 0)" + DONE,
    "take another's descriptor": CALL + "call(438, call(434, PID, 0), 0, 0)" + DONE,
    "many processes": "import os, time\nfor i in range(40):\n    if os.fork() == 0:\n        time.sleep(1); os._exit(0)"
    + DONE,
    "many threads": "import threading, time\nfor i in range(60): threading.Thread(target=time.sleep, args=(1,)).start()"
    + DONE,
    "outlive the program": "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(0.8); open('SHARED/late', 'w')"
    "\nelse: print('LATER')",
    "a higher priority": "import os; os.nice(-5)" + DONE,
    # ---- network and channels ----
    "connect to this machine": "import socket; socket.create_connection(('127.0.0.1', PORT), 2)" + DONE,
    "listen": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()" + DONE,
    "ask a name server": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))"
    + DONE,
    "an abstract socket": "import socket; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + 'NAME')" + DONE,
    "shared memory of System V": CALL + "i = libc.shmget(KEY, 0, 0)\nassert i >= 0" + DONE,
    "memory that nobody has attached": CALL + "libc.shmctl(call(29, 0, 700 << 20, 0o1600), 0, None)" + DONE,
    "memory of semaphores": CALL + "libc.semctl(call(64, 0, 32000, 0o1600), 0, 0)" + DONE,
    "memory of message queues": CALL + "libc.msgctl(call(68, 0, 0o1600), 0, None)" + DONE,
    "memory of files without a name": "import os\nfor i in range(40): os.write(os.memfd_create('m'), bytes(1 << 20))"
    + DONE,
    "memory that only a pipe holds": "import ctypes, mmap, os\nm = mmap.mmap(-1, 4096)\n"
    "b = ctypes.c_char.from_buffer(m)\nclass V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
    "assert ctypes.CDLL(None).vmsplice(os.pipe()[1], ctypes.byref(V(ctypes.addressof(b), 4096)), 1, 0) == 4096" + DONE,
    "the kernel's command line": "assert open('/proc/cmdline').read()" + DONE,
    "see the network's devices": "import socket; assert len(socket.if_nameindex()) > 1" + DONE,
    # ---- privileges and the kernel ----
    "become root": "import os; os.setuid(0); assert os.getuid() == 0" + DONE,
    "mount": CALL + "os.mkdir('m') if not os.path.isdir('m') else 0\n"
    "assert libc.mount(b'tmpfs', b'm', b'tmpfs', 0, None) == 0; libc.umount2(b'm', 2)" + DONE,
    "new namespaces": CALL + "assert libc.unshare(0x10000000) == 0" + DONE,
    "another's namespace": CALL + "assert libc.setns(os.open('/proc/1/ns/uts', 0), 0) == 0" + DONE,
    "io_uring": CALL + "call(425, 4, ctypes.create_string_buffer(120))" + DONE,
    "bpf": CALL
    + "import struct; call(321, 0, struct.pack('IIIIIIII16sI', 2, 4, 4, 1, 0, 0, 0, 0, b'x', 0), 52)"
    + DONE,
    "performance counters": CALL
    + "import struct; call(298, struct.pack('IIQQQQ', 1, 112, 0, 0, 0, 0) + bytes(72), 0, -1,"
    " -1, 0)" + DONE,
    "the keyring": CALL + "call(248, b'user', b'tilth', b'x', 1, -3)" + DONE,
    "the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, time.time())" + DONE,
    "the host's name": "import socket; socket.sethostname(socket.gethostname())" + DONE,
    "the kernel's log": CALL + "call(103, 3, ctypes.create_string_buffer(64), 64)" + DONE,
    "userfaultfd": CALL + "call(323, 0)" + DONE,
    "use up the host's asynchronous requests": CALL
    + "c = ctypes.c_ulong(0); call(206, 8, ctypes.byref(c)); libc.syscall(207, c)"
    + DONE,
    "lock a file of the host": "import fcntl; fcntl.flock(open('/usr/bin/env'), fcntl.LOCK_EX | fcntl.LOCK_NB)" + DONE,
    "lock a file of the host by fcntl": "import fcntl; fcntl.lockf(open('/usr/bin/env', 'rb'), fcntl.LOCK_SH)" + DONE,
    "lock an open file of the host": "import fcntl, struct; fcntl.fcntl(open('/usr/bin/env', 'rb'), 37, struct.pack('hhqqi', 0, 0, 0, 0, 0))"
    + DONE,
    "watch a folder of the host by fcntl": "import fcntl, os; fcntl.fcntl(os.open('/usr/bin', 0), fcntl.F_NOTIFY, fcntl.DN_ACCESS)"
    + DONE,
    "watch what the host opens": CALL
    + "i = call(294, 0)\nassert libc.inotify_add_watch(i, b'/usr/bin', 0x20) >= 0"
    + DONE,
    "watch it the older way": CALL + "i = call(253)\nassert libc.inotify_add_watch(i, b'/usr/bin', 0x20) >= 0" + DONE,
    "watch all files": CALL + "call(300, 0x200, 0)" + DONE,
    "a call that the filter does not know": CALL + "call(465, -100, b'/usr', 0, None, 0)" + DONE,
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (5000, 5000))" + DONE,
    # ---- resources and what is inherited ----
    "descriptors": "import os\nopen_ = [f for f in range(3, 9999) if os.path.exists(f'/proc/self/fd/{f}')]\nassert FD in open_"
    + DONE,
    "variables": "import os; assert os.environ['TILTH_TOKEN'] == 'secret'" + DONE,
    "much memory": "x = bytearray(700 << 20)" + DONE,
    "without end": "import time\nend = time.monotonic() + 1.3\nwhile time.monotonic() < end: pass" + DONE,
    "sleep without end": "import time; time.sleep(1.3)" + DONE,
    "much output": "for i in range(300): print('x' * 10000)" + DONE,
    "modules of the host": "import numpy" + DONE,
    "modules of Tilth": "import sys; sys.path.append('SOURCE'); import tilth" + DONE,
    "the folder of Tilth": "import sys; assert 'SOURCE' in str(sys.orig_argv) + open('/proc/self/cmdline').read()"
    + DONE,
    "read packages beside Python": "import glob, sys; assert glob.glob(sys.base_prefix + '/lib*/python3*/*-packages/*')"
    + DONE,
}
