"""Run a command in Linux namespaces: ``jail.py FOLDER MEGABYTES PATH... -- COMMAND...``.

The command sees the paths and this file's folder, as ``/code``, which it cannot write to, and a
disk of its own in memory, ``/graded``, where it starts. It has its own processes and no network: it
can neither see nor signal another process, nor reach a file that is not among the paths. In
``FOLDER``, which is empty, its root is put together. The exit status is the command's, or
``REFUSED`` where the system has no such namespaces for this user. The standard library is enough:
this runs before anything else.
"""

import ctypes
import fcntl
import os
import platform
import resource
import signal
import socket
import struct
import sys

REFUSED = 97  # exit status
HOME, CODE = "/graded", "/code"
DEVICES = ("null", "zero", "full", "random", "urandom")
NOBODY, STUDENT = 65534, 1000
ACCOUNTS = range(61184, 65520)  # of a moment, as systemd gives them: the system counts by account
USER, SPACES = 0x10000000, 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000
BIND, RECURSIVE, PRIVATE, DETACH = 0x1000, 0x4000, 0x40000, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, HERE, EVERYWHERE, READ_ONLY = 442, -100, 0x8000, 1
PROCESSES = 200  # and threads: beyond what the grader allows, which looks ten times a second
libc = ctypes.CDLL(None, use_errno=True)


def main(folder: str, megabytes: str, *words: str) -> int:
    """Set all up; then wait for the command, as the parent of the first process inside."""
    end = words.index("--")
    paths, command = words[:end], words[end + 1 :]
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end when the grader does
    root = os.getuid() == 0 and libc.unshare(SPACES) == 0
    student = ACCOUNTS[os.getpid() % len(ACCOUNTS)] if root else STUDENT
    if not root:
        _as_user()
    first = os.fork()
    if first:
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    libc.prctl(1, signal.SIGKILL)
    _build(folder, megabytes, paths, student)
    child = os.fork()
    if not child:
        _run(command, student, root)
    while True:  # whoever loses its parent is this process's to bury; when it ends, all end
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _call(name: str, *given: object) -> None:
    if getattr(libc, name)(*given) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _as_user() -> None:
    """Namespaces for whoever is not root: a user who has power over nothing else."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", USER | SPACES)
    maps = {
        "setgroups": "deny",
        "uid_map": f"{STUDENT} {user} 1",
        "gid_map": f"{STUDENT} {group} 1",
    }
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as stream:
            stream.write(text)


def _build(folder: str, megabytes: str, paths: tuple[str, ...], owner: int) -> None:
    """A root directory that holds the paths, and nothing else of this machine."""

    def mount(source: str, target: str, flags: int = 0, kind: str = "", data: str = "") -> None:
        _call("mount", *(os.fsencode(x) for x in (source, target, kind)), flags, data.encode())

    mount("none", "/", RECURSIVE | PRIVATE)
    mount("tmpfs", folder, 0, "tmpfs", "size=1m,mode=755")
    shown = {path: path for path in (*paths, *(f"/dev/{name}" for name in DEVICES))}
    for path, place in (shown | {os.path.dirname(os.path.abspath(__file__)): CODE}).items():
        target = folder + place
        os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
        if not os.path.isdir(path) and not os.path.exists(target):
            open(target, "x").close()
        mount(path, target, BIND | RECURSIVE)
    for name in ("/proc", "/tmp", "/dev/shm", "/dev/pts", HOME):
        os.makedirs(folder + name, exist_ok=True)
    os.symlink("/proc/self/fd", folder + "/dev/fd")
    os.symlink("pts/ptmx", folder + "/dev/ptmx")
    read_only = struct.pack("4Q", READ_ONLY, 0, 0, 0)
    _call("syscall", MOUNT_SETATTR, HERE, folder.encode(), EVERYWHERE, read_only, len(read_only))
    mount("proc", folder + "/proc", 0, "proc")
    mount("devpts", folder + "/dev/pts", 0, "devpts", "newinstance,ptmxmode=0666")
    mount("tmpfs", folder + HOME, 0, "tmpfs", f"size={megabytes}m,nr_inodes=50k,uid={owner}")
    for name in ("/tmp", "/dev/shm"):
        mount(folder + HOME, folder + name, BIND)
    os.chdir(folder)
    _call("syscall", PIVOT_ROOT[platform.machine()], b".", b".")
    _call("umount2", b".", DETACH)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 0x41))  # it may talk to itself


def _run(command: tuple[str, ...], student: int, root: bool) -> None:
    os.setsid()
    os.chdir(HOME)
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
    if root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(student, student, student)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS; capabilities end with the program
    os.execv(command[0], command)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except OSError as error:
        print(f"no namespaces: {error}", file=sys.stderr)
        os._exit(REFUSED)
