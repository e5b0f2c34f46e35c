"""What building the book needs of a machine, beside what ``iclutils.doctor`` looks at."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from iclutils.doctor import Finding, listed, missing, note, ok

PROGRAMS = {
    "git": "results then do not say which commit they come from",
    "make": "the commands of the Makefile; python -m book._tools works without it",
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def examine() -> list[Finding]:
    """Look at the kernel of the notebooks, and at programs beside Python."""
    return listed(kernel(), programs())


def kernel() -> Iterator[Finding]:
    """Whether the kernel ``python3``, which the notebooks ask for, is this Python."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    cure = f"{sys.executable} -m ipykernel install --prefix {sys.prefix} --name python3"
    try:
        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        yield missing("no Jupyter kernel named python3", cure)
        return
    # Jupyter starts a bare name as the Python that it runs in itself.
    bare = ("python", f"python{sys.version_info[0]}", "python{}.{}".format(*sys.version_info))
    if program in bare or Path(program).parent.resolve() == Path(sys.executable).parent.resolve():
        yield ok("Jupyter kernel python3: this Python")
    else:
        yield missing(f"Jupyter kernel python3 is another Python: {program}", cure)


def browser() -> str | None:
    """Path of an installed Chromium or Chrome, if there is one."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def programs() -> Iterator[Finding]:
    """Programs beside Python: each optional."""
    for name, without in PROGRAMS.items():
        yield ok(name) if shutil.which(name) else note(f"{name} is not there: {without}")
    what, cure = "browser for the tests of the pages", "install Chromium or Chrome"
    yield ok(f"{what}: {path}") if (path := browser()) else note(f"no {what}; they skip", cure)
