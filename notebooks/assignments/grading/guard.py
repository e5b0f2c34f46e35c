"""What code under grading may not do, by Python's own audit hooks, which cannot be removed.

Every Python process that is started while a submission is graded runs ``begin`` first. The network
is closed, files are bounded, a signal to another's process is refused. Where the system has no
namespaces (``jail``), nothing else but libraries can be read, nothing outside the submission's own
folder be written, and no program be started; native code can go round that. What was tried is
``sent`` to the grader. This uses the standard library alone, because it runs before anything else.
"""

import json
import os
import socket
import sys
from typing import Any

FOLDER, TO, MAY_READ = "ICLUTILS_GRADED_IN", "ICLUTILS_GRADED_TO", "ICLUTILS_GRADED_MAY_READ"
LARGEST = 256 * 2**20  # bytes of one file
PATIENCE = 5  # seconds on the clock for each of the processor's that a submission may use
NAMES = {"localhost", "", "::1", "0.0.0.0", "::", socket.gethostname()}
CONNECT = {"socket.connect", "socket.sendto", "socket.sendmsg"}
RESOLVE = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}
CHANGE = {"remove", "rename", "rmdir", "mkdir", "truncate", "chmod", "chown", "link"}
START = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"}
HARMLESS = ("fc-list", "uname", "ldconfig", "lscpu", "nvidia-smi", "gcc", "cc", "ld", "clang")
NATIVE = {"system", "popen", "execv", "execve", "execvp", "fork", "vfork", "posix_spawn", "kill",
          "killpg", "ptrace", "syscall", "open", "openat", "fopen", "unlink", "rename"}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def send(about: dict[str, Any], more: bytes = b"") -> None:
    """Tell the grader: a line of JSON and bytes, preceded by how many there are."""
    whole = json.dumps(about).encode() + b"\n" + more
    whole, to = len(whole).to_bytes(8, "little") + whole, int(os.environ[TO])
    while whole:
        whole = whole[os.write(to, whole) :]


def install(folder: str, readable: list[str]) -> None:
    """Watch this process from now on; files and programs only where something is ``readable``."""
    inside = os.path.realpath(folder)
    free = (inside, "/dev", "/proc/self")
    roots = (*free, "/proc", "/sys", *map(os.path.realpath, readable))

    def within(path: Any, places: tuple[str, ...]) -> bool:
        if isinstance(path, int) or path is None:
            return True
        real = os.path.realpath(os.fsdecode(path))
        return any(real == place or real.startswith(place + os.sep) for place in places)

    def refuse(why: str, what: object = "") -> None:
        if what:
            send({"note": str(what)[:100]})
        raise PermissionError(f"{why} while this is graded.")

    def others(pid: int, group: bool) -> bool:
        if pid <= 0 and not group:
            pid, group = -pid, True
        try:
            return pid == 1 or (pid > 0 and os.getsid(pid) != os.getsid(0))
        except ProcessLookupError:
            return False

    def watch(event: str, given: tuple[Any, ...]) -> None:
        if event in CONNECT or event in RESOLVE:
            where = given[1] if event in CONNECT else given[0]
            host = where[0] if isinstance(where, tuple) else where if event in RESOLVE else None
            host = host.decode() if isinstance(host, bytes) else host
            if host is not None and host not in NAMES and not str(host).startswith("127."):
                refuse("The network is closed", f"the network, {host}")
        elif event in ("os.kill", "os.killpg") and others(given[0], event == "os.killpg"):
            refuse("Other processes are closed", "another process, by a signal")
        elif not readable:
            return
        elif event == "open":
            path, _, flags = given
            if isinstance(flags, int) and flags & WRITING and not within(path, free):
                refuse(f"Only the own folder can be written to, not {path},")
            if not within(path, roots):
                refuse(f"Only libraries and the own folder can be read, not {path},")
        elif event.startswith("os.") and event[3:] in CHANGE:
            for path in given[: 2 if event in ("os.rename", "os.link") else 1]:
                if not within(path, free):
                    refuse(f"Only the own folder can be changed, not {path},")
        elif event in START:
            name = given[0] or (given[1] or [""])[0] if len(given) > 1 else given[0]
            name = os.fsdecode(name) if isinstance(name, bytes) else str(name)
            known = os.path.basename(name.split(" ")[0]) in HARMLESS
            refuse("Other programs are closed", "" if known else f"a program, {name}")
        elif event == "ctypes.dlsym" and str(given[1]) in NATIVE:
            refuse("The system's own functions are closed", f"native code, {given[1]}")

    sys.addaudithook(watch)


def bound_files() -> None:
    """No file beyond ``LARGEST``, no core dumps."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def begin() -> None:
    """What a submission's ``sitecustomize`` does."""
    if folder := os.environ.get(FOLDER):
        if sys.platform != "win32":
            bound_files()
        install(folder, list(filter(None, os.environ.get(MAY_READ, "").split(os.pathsep))))
