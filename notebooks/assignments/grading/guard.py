"""What code under grading may not do. This file is a submission's ``sitecustomize``.

Every Python process that is started while a submission is graded runs this first: it closes the
network, bounds the size of files, refuses to write outside the submission's own folder and to read
the solutions. An attempt to reach the network is noted in a file, which ``grading`` reports. The
hooks are Python's own audit hooks, which cannot be removed; native code can go round them. Where
the system permits it, the processes get a network of their own without a way out, which native
code cannot leave.

It uses the standard library alone, because it runs before anything else.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

FOLDER, NOTE, ALONE = "ICLUTILS_GRADED_IN", "network.txt", "ICLUTILS_GRADED_ALONE"
SECRET = "ICLUTILS_GRADED_SECRET"  # the folder of the solutions
LARGEST = 256 * 2**20  # bytes of one file
NAMES = {"localhost", "", "::1", "0.0.0.0", "::", socket.gethostname()}
CONNECT = {"socket.connect", "socket.sendto", "socket.sendmsg"}
RESOLVE = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}
CHANGE = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.link"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def install(folder: str, secret: str = "") -> None:
    """Watch this process from now on."""
    inside = os.path.realpath(folder)
    closed = os.path.realpath(secret) + os.sep if secret else ""

    def at_home(path: Any) -> bool:
        if isinstance(path, int) or path is None:
            return True
        real = os.path.realpath(os.fsdecode(path))
        return real.startswith((inside + os.sep, "/dev/", "/proc/self/")) or real == inside

    def local(host: Any) -> bool:
        host = host.decode() if isinstance(host, bytes) else host
        return host is None or host in NAMES or str(host).startswith("127.")

    def watch(event: str, given: tuple[Any, ...]) -> None:
        if event in CONNECT or event in RESOLVE:
            where = given[1] if event in CONNECT else given[0]
            host = where[0] if isinstance(where, tuple) else where if event in RESOLVE else None
            if not local(host):
                with open(os.path.join(inside, NOTE), "a", encoding="utf-8") as note:
                    note.write(f"{host}\n")
                raise PermissionError("The network is closed while this is graded.")
        elif event == "open":
            path, _, flags = given
            if isinstance(flags, int) and flags & WRITING and not at_home(path):
                raise PermissionError(f"Only the own folder can be written to, not {path}.")
            named = closed and isinstance(path, str | bytes | os.PathLike)
            if named and os.path.realpath(os.fsdecode(path)).startswith(closed):
                raise PermissionError("The solutions are closed while this is graded.")
        elif event in CHANGE:
            for path in given[: 2 if event in ("os.rename", "os.link") else 1]:
                if not at_home(path):
                    raise PermissionError(f"Only the own folder can be changed, not {path}.")

    sys.addaudithook(watch)


def leave_the_network() -> None:
    """Get a network without a way out, where the system lets us (Linux); once per submission."""
    import ctypes
    import fcntl
    import struct

    libc = ctypes.CDLL(None, use_errno=True)
    network, user = 0x40000000, 0x10000000  # CLONE_NEWNET, CLONE_NEWUSER
    if libc.unshare(network) and libc.unshare(network | user):
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up = struct.pack("16sh", b"lo", 0x41)  # IFF_UP and IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS: the kernel answers on this address
    os.environ[ALONE] = "1"


def bound_files() -> None:
    """No file beyond ``LARGEST``, no core dumps."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "sitecustomize" and os.environ.get(FOLDER):
    if sys.platform == "linux" and not os.environ.get(ALONE):
        leave_the_network()
    if sys.platform != "win32":
        bound_files()
    install(os.environ[FOLDER], os.environ.get(SECRET, ""))
