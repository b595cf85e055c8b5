"""SIGTERM and Ctrl-C during training."""

import signal


class StopSignal:
    """Before the loop, a signal ends the script at once; during the loop, it takes effect when the step is done.

    A second signal stops at once.
    """

    def __init__(self):
        self.received, self.name, self.deferring = False, "another process", False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number, frame) -> None:
        self.received, self.name = True, signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        if not self.deferring:
            raise KeyboardInterrupt(self.name)


def ignore_signals(worker: int) -> None:
    """For data loader workers: one that dies of a signal would end the process before its checkpoint is written."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
