"""Trains in a child, kills it at a random moment, resumes, again and again; prints a JSON line for each kill.

    python killed_run.py FOLDER KILLS SEED

The child writes a line after each step of the optimizer, so that what was taken is known whatever the run says.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from eachgrad.private import Run, make_private

N = 40


def resumed(folder: Path) -> Run:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    dataset = TensorDataset(torch.randn(N, 3), torch.randn(N, 2))
    return make_private(
        model, torch.optim.Adam(model.parameters()), dataset, loss_fn=lambda out, y: (out - y).square().sum(1),
        batch_size=8, steps=1_000_000, noise_multiplier=1.0, target_delta=1e-3, accountant="rdp", progress=False,
        checkpoint=folder / "run.pt", resume=True,
    )  # fmt: skip


def child(folder: Path) -> None:
    """Trains until it is killed, and saves every third step."""
    log = os.open(folder / "taken", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    run = resumed(folder)
    for batch in run.loader:
        run.step(batch)
        os.write(log, b".")
        if run.spent % 3 == 0:
            run.save()


def steps_in(folder: Path) -> int:
    """How many steps the children have taken so far."""
    return len((folder / "taken").read_bytes()) if (folder / "taken").exists() else 0


def wait(pid: int, folder: Path, generator: random.Random) -> None:
    """Until a moment to kill the child at: one in four while it starts, the others among its first steps and saves."""
    if generator.random() < 0.75:
        enough = steps_in(folder) + generator.randint(1, 8)
        while steps_in(folder) < enough:
            if os.waitpid(pid, os.WNOHANG)[0]:
                raise SystemExit("the child has ended by itself")
            time.sleep(0.0005)
    time.sleep(generator.uniform(0, 0.02))


def main() -> None:
    folder, kills, generator = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    for k in range(kills):
        pid = os.fork()
        if pid == 0:
            child(folder)
            os._exit(1)
        wait(pid, folder, generator)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        taken = steps_in(folder)
        run = resumed(folder)
        run.close()
        saved = int(next(iter(run.optimizer.state.values()))["step"]) if run.optimizer.state else 0
        found = {
            "killed": os.WIFSIGNALED(status), "taken": taken, "counted": run.spent, "lost": run.lost, "saved": saved,
            "files": sorted(p.name for p in folder.iterdir()),
        }  # fmt: skip
        if k == kills - 1:
            found["epsilon"] = run.epsilon()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
