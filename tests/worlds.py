"""Runs in processes of their own: several that train together over gloo, or one that is killed.

Children are forked from a server that has imported everything once, so that a process costs tenths of a second.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
import warnings

import torch
from safetensors.torch import load_file

import deepspec
from deepspec.checked import InputError
from deepspec.data.batches import Batches
from deepspec.train.distributed import leave

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["worlds", "deepspec.train.loop", "transformers.models.qwen3.modeling_qwen3", "torch._dynamo", "accelerate"]
)
SECONDS = 120
"""After which a group of processes is taken to hang."""


def together(size: int, function, *args) -> list:
    """function(*args) in each of `size` processes of one group; their results in order of rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pipes, children = [], []
    for rank in range(size):
        mine, theirs = _CONTEXT.Pipe()
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        child = _CONTEXT.Process(target=_child, args=(theirs, env, function, args), daemon=True)
        child.start()
        theirs.close()
        pipes.append(mine)
        children.append(child)
    end, results = time.monotonic() + SECONDS, []
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(max(0, end - time.monotonic())), f"process {rank} of {size} hangs"
            results.append(pipe.recv())
    finally:
        for child in children:
            child.kill()
            child.join()
    broken = [r for r in results if isinstance(r, str)]
    assert not broken, "\n".join(broken)
    return [r[0] for r in results]


def _child(pipe, env, function, args) -> None:
    os.environ |= {k: str(v) for k, v in env.items()} | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        result = (function(*args),)
    except BaseException:
        result = traceback.format_exc()
    pipe.send(result)
    with contextlib.suppress(Exception):
        leave()


def process(function, *args):
    """function(*args) in a process that can be killed."""
    child = _CONTEXT.Process(target=function, args=args, daemon=True)
    child.start()
    return child


def command(*words: str):
    """`python -m deepspec.train WORDS` as a process that can be killed."""
    return process(_command, words)


def _command(words) -> None:
    torch.set_num_threads(1)
    sys.argv = ["deepspec.train", *words]
    from deepspec import cli
    from deepspec.train.__main__ import command

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    cli.main(command)


# -- what processes do -------------------------------------------------------------------------------------------------


def train(jobs: list[tuple]) -> list[dict]:
    """Each job: (config file, overrides, step to stop after or None). What this process saw of each."""
    seen = []
    for file, overrides, until in jobs:
        config = deepspec.load_config(file, *overrides)
        reports, served = [], []
        with recorded(served):
            run = deepspec.fit(config)
            for report in run:
                reports.append({"step": report.step, "lr": report.lr, "tokens": report.tokens, **report.metrics})
                if report.step == until:
                    run.close()  # all processes at the same step
                    break
        seen.append({"reports": reports, "served": served})
    return seen


def train_on_unlike_machines(file, overrides) -> str:
    """Where the first process' machine is quick in bfloat16 and the others' are not: what ends the run, or ''."""
    torch.backends.cpu.get_cpu_capability = lambda: "AVX512"
    torch.cpu._is_avx512_bf16_supported = lambda: os.environ["RANK"] == "0"
    try:
        list(deepspec.fit(deepspec.load_config(file, *overrides)))
    except InputError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def recorded(served: list):
    """Notes the numbers of the sequences whose micro-batches are made."""
    real = Batches.batch

    def batch(self, picked):
        served.extend(number for number, _ in picked)
        return real(self, picked)

    Batches.batch = batch
    try:
        yield
    finally:
        Batches.batch = real


def state(out, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimiser state of a checkpoint."""
    folder = out / "checkpoints" / f"step-{step:07d}"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.state")
