"""Starts training scripts without importing torch and its libraries again, which takes longer than a tiny run.

One process imports what the scripts import, and forks a child for every run. A child is a process in a session of its own,
which can be killed like any other; it runs the script as the interpreter would, and its results are the same to the bit. What
a fork cannot show, such as a missing import, shows `fresh=True`, with which a script is started in the usual way.

A fork keeps only one thread: nothing that the server imports may start another.
The allocator of pyarrow does, and is made for forks.
"""

import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import psutil


ROOT = Path(__file__).parents[1]
LAZY_MODULES = ["matplotlib.pyplot", "torch._dynamo"]  # large ones, imported by functions


class ScriptProcess:
    """A run that the server has started; as much of `subprocess.Popen` as tests use."""

    def __init__(self, channel: socket.socket, script: Path, flags: list[str], processes: int):
        self.returncode: int | None = None
        self.outputs = [tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")]
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        request = {"script": str(script), "flags": flags, "processes": processes, "folder": os.getcwd()}
        with theirs:
            descriptors = [theirs.fileno(), *(file.fileno() for file in self.outputs)]
            socket.send_fds(channel, [json.dumps(request).encode()], descriptors)
        self.pid = self.connection.recv()

    def poll(self) -> int | None:
        if self.returncode is None and self.connection.poll():
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self.connection.recv()
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        self.wait()
        for file in self.outputs:
            file.seek(0)
        return self.outputs[0].read(), self.outputs[1].read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def variables() -> dict[str, str]:
    """The environment of scripts."""
    others = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {**others, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@functools.cache
def start_server() -> tuple[socket.socket, dict[str, str]]:
    """The socket that takes requests, and the environment of all runs; the server ends with the process that holds it."""
    ours, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen([sys.executable, __file__], stdin=theirs, env=variables())
    return ours, variables()


def start_script(
    script: str,
    *flags,
    processes: int = 1,
    fresh: bool = False,
    environment: dict[str, str] | None = None,
    file_limit: int | None = None,
) -> ScriptProcess | subprocess.Popen:
    """Starts a script of `training/` in one process, or in several as `torchrun` does, in a session of its own.

    Args:
        fresh (`bool`, defaults to `False`): In a new interpreter.
        environment (`dict[str, str]`, *optional*): Variables to add. Libraries read theirs when they are imported, so that
            a run with variables that the server does not have is a fresh one.
        file_limit (`int`, *optional*): Kilobytes; no file of the run, which is a fresh one, can grow past them, as if the
            disk were full.
    """
    path, words = ROOT / "training" / script, [str(flag) for flag in flags]
    environment = variables() | (environment or {})
    if not fresh and file_limit is None:
        channel, environment_of_server = start_server()
        if environment == environment_of_server:
            return ScriptProcess(channel, path, words, processes)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(free_port())]
    limit = ["bash", "-c", "ulimit -f $0; trap '' XFSZ; exec \"$@\"", str(file_limit)]
    return subprocess.Popen(
        [*(limit if file_limit else []), sys.executable, *(launcher if processes > 1 else []), str(path), *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def kill(process: ScriptProcess | subprocess.Popen) -> tuple[str, str]:
    """SIGKILL for a run and all its processes, some of which are in sessions of their own; what it had printed."""
    parent = psutil.Process(process.pid)
    parent.suspend()  # it starts no more of them, and sees none die
    family = [parent, *parent.children(recursive=True)]
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(family)
    return process.communicate()


# The server.


def serve(channel: socket.socket) -> dict:
    """Forks for every request; returns the request in the processes that are to run its script."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 2**20, 3)
        if not message:  # the tests have ended
            sys.exit()
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    channel.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with open(os.devnull) as nothing:
        for number, descriptor in enumerate([nothing.fileno(), *descriptors[1:]]):
            os.dup2(descriptor, number)
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    request = json.loads(message)
    with Connection(descriptors[0]) as supervisor:
        if pid := os.fork():
            supervisor.send(pid)
            supervisor.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
    os.setsid()
    os.chdir(request["folder"])
    if request["processes"] > 1:
        launch(request["processes"])
    return request


def launch(processes: int) -> None:
    """Returns in each of several processes, with the variables of `torchrun`; their parent waits for them."""
    port, ranks, failed = free_port(), set(), False
    for rank in range(processes):
        if (pid := os.fork()) == 0:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            numbers["MASTER_PORT"] = port
            os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
            return
        ranks.add(pid)
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status != 0:
            failed = True
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    os._exit(int(failed))


def main() -> None:
    scripts = [path.stem for path in (ROOT / "training").glob("*.py")]
    sys.path[0] = str(ROOT / "training")  # as for a script that is started there
    for name in [*scripts, *LAZY_MODULES]:
        importlib.import_module(name)
    for name in scripts:
        del sys.modules[name]
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()  # children share this memory as long as nobody writes to it
    request = serve(socket.socket(fileno=os.dup(0)))
    sys.argv = [request["script"], *request["flags"]]
    runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    main()
