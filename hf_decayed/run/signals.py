"""SIGTERM and Ctrl-C during training."""

import os
import signal


class StopSignal:
    """Before the loop, a signal ends the script at once; during the loop, it takes effect when the step is done.

    After the loop, the script finishes its evaluation. A second signal stops at once.
    """

    def __init__(self):
        self.received, self.name, self.deferring, self.finishing = False, "another process", False, False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number, frame) -> None:
        self.received, self.name = True, signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        if not self.deferring:
            raise KeyboardInterrupt(self.name)
        if self.finishing:  # not by `print`, which the signal may have interrupted
            os.write(2, b"\ntraining is done, and the results follow; a second signal stops at once\n")


def ignore_signals(worker: int) -> None:
    """For data loader workers: one that dies of a signal would end the process before its checkpoint is written."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
