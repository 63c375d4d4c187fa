"""Pages start in a folder of their own, with the files they name, on one thread, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.docs import stand_ins


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("stand-ins")
    stand_ins.write_all(folder)
    return folder


@pytest.fixture
def desk(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that a page's code runs in."""
    state = pytest.importorskip("accelerate.state")
    shutil.copytree(made, tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    settings = {"ACCELERATE_USE_CPU": "true", "COLUMNS": "200", "TERM": "dumb"}
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**settings, **group, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    environment = dict(os.environ)
    yield tmp_path / "desk"
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(threads)
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
