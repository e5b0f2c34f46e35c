"""Sweeps of trainings: the same on any backend, and nothing finished is lost."""

import os
import signal
import time
from dataclasses import replace

import joblib
import pytest
from small_recipes import digests, regressor

from iclutils import IclError
from training import sweep

NAMES = ["deep", "plain", "noisy", "wide"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of the same sweep, one training after the other in this process."""
    out = tmp_path_factory.mktemp("alone")
    sweep.sweep([regressor(name, 60) for name in NAMES], out, jobs=1)
    return out


@pytest.fixture
def cluster():
    """Two workers. Dask tells this process, too, to use one thread; later tests should not."""
    from distributed import LocalCluster

    before = dict(os.environ)
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as started:
        yield started
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.nightly
def test_processes_give_the_bits_of_one_after_the_other(alone, tmp_path):
    folders = sweep.sweep([regressor(name, 60) for name in NAMES], tmp_path, jobs=2)
    assert [folder.name for folder in folders] == NAMES
    assert digests(tmp_path) == digests(alone)
    assert len(set(digests(alone).values())) == len(NAMES)


@pytest.mark.nightly
def test_a_dask_cluster_gives_the_same_and_survives_a_killed_worker(alone, tmp_path, cluster):
    """A worker dies under its training: the others finish, and the sweep ends with all bits."""
    import threading

    from distributed import Client

    long = [*(regressor(name, 60) for name in NAMES), regressor("long", 1500)]
    sweep.sweep(long[-1:], alone.parent / "long", jobs=1)
    killed = []
    with Client(cluster) as client:
        workers = client.run(os.getpid)

        def kill():
            while not (tmp_path / "long" / "resume.safetensors").is_file():
                time.sleep(0.02)
            busy = [a for a, tasks in client.processing().items() if tasks]
            for address in busy:
                killed.append(workers[address])
                os.kill(workers[address], signal.SIGKILL)

        watcher = threading.Thread(target=kill)
        watcher.start()
        with joblib.parallel_config("dask"):
            sweep.sweep(long, tmp_path)
        watcher.join()
    assert killed
    assert digests(tmp_path) == digests(alone) | digests(alone.parent / "long")


def test_one_that_fails_costs_only_itself_and_what_is_missing_is_trained(tmp_path):
    bad = replace(regressor("plain", 4), peak_rate=1e38)
    with pytest.raises(IclError, match=r"1 of 2 trainings failed: plain: the loss is"):
        sweep.sweep([bad, regressor("deep", 4)], tmp_path, jobs=1)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "deep").rglob("*") if p.is_file()}
    assert not (tmp_path / "plain" / "SHA256SUMS").exists()
    sweep.sweep([regressor("plain", 4), regressor("deep", 4)], tmp_path, jobs=1)
    assert (tmp_path / "plain" / "SHA256SUMS").is_file()
    assert {p: p.stat().st_mtime_ns for p in before} == before
