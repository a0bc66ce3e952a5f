"""Hands what this process was asked to run to the server of ``forked``, and ends as the fork ends. Imports little."""

import _socket
import array
import os
import signal
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def opened():
    """Return the open files that a new program would inherit."""
    found = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            found += [number] if os.get_inheritable(number) else []
        except OSError:
            pass  # that of the list itself
    return found


def main():
    place, name, *arguments = sys.argv[1:]
    files = opened()
    request = {"name": name, "arguments": arguments, "files": files}
    request |= {"environment": dict(os.environ), "folder": os.getcwd()}
    request["hangup"] = int(signal.getsignal(signal.SIGHUP))
    data = ascii(request).encode() + b"\n"
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    server.connect(place)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    sent = server.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", files).tobytes())])
    server.sendall(data[sent:])
    code = int(server.recv(64) or -signal.SIGKILL)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
