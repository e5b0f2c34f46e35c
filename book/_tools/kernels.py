"""Kernels that need not import: each is forked from one process that has imported what chapters
import, and starts as a fresh one does. For Linux, where nothing that is imported minds a fork."""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import warnings
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pkgutil import walk_packages
from threading import Lock
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning import LocalProvisioner

import iclutils
from iclutils import science
from iclutils.errors import IclError
from iclutils.files import CHECKOUT

LAUNCHER = "ipykernel_launcher"
NEEDED = ("ipykernel.kernelapp", "matplotlib.pyplot", "transformers.models.llama.modeling_llama")
PARTS = tuple(f"iclutils.{name}." for name in ("chapters", "interp", "models", "plots", "tasks"))


LOST = "the process that has imported for all of them ended; what it said stands above."
INLINE = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}  # as a kernel sets it


class Forked:
    """The process of a kernel, with what Jupyter asks of a ``subprocess.Popen``."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """0 once it has ended: the template, whose child it is, collects its status."""
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, PermissionError):  # gone, or another's by now
            return 0
        return None

    wait = poll

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that has imported all. It ends with its ``with`` block."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.lock, environment = Lock(), environment | INLINE
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__], env=environment, cwd=CHECKOUT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def fork(self, *asked: Any) -> Forked:
        """A kernel of this command, environment and folder."""
        assert self.process.stdin
        assert self.process.stdout
        with self.lock, suppress(BrokenPipeError):
            print(json.dumps(asked), file=self.process.stdin, flush=True)
            if (said := self.process.stdout.readline().strip()).isdigit():
                return Forked(int(said))
            raise IclError(f"No kernel could be started: {said or LOST}")
        raise IclError(f"No kernel could be started: {LOST}")

    def manager(self, **options: Any) -> AsyncKernelManager:
        """What nbclient has its kernel from."""
        made = AsyncKernelManager(kernel_id=os.urandom(8).hex(), **options)
        of = {"kernel_id": made.kernel_id, "kernel_spec": made.kernel_spec, "parent": made}
        made.provisioner = provisioner = _Provisioner(**of)
        provisioner.template = self
        return made


class _Provisioner(LocalProvisioner):
    template: Template
    process: Any

    async def launch_kernel(self, cmd: list[str], **given: Any) -> KernelConnectionInfo:
        self.process = process = self.template.fork(cmd, given["env"], str(given["cwd"]))
        self.pid = self.pgid = process.pid
        return self.connection_info


def _serve() -> None:
    """Fork a kernel for each line that is read; return in the kernel, ready to start."""
    parent = {"JPY_PARENT_PID": str(os.getpid())}  # a kernel whose parent is gone ends
    os.environ.update(parent)
    science.sources()  # as they are now: what is imported here is what every kernel runs
    with redirect_stdout(sys.stderr):
        for name in NEEDED:
            import_module(name)
        for found in walk_packages(iclutils.__path__, "iclutils."):
            if found.name.startswith(PARTS):
                import_module(found.name)
    gc.freeze()
    warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
    collect = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        command, environment, folder = json.loads(line)
        try:
            pid: int | str = os.fork()
        except OSError as error:
            pid = str(error)
        if pid:
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, collect)
        os.setsid()
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        os.environ.update(environment | parent)
        sys.argv, sys.path[:1] = command[command.index(LAUNCHER) :], []
        return
    os._exit(0)


if __name__ == "__main__":
    _serve()
    runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)
