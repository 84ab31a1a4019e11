"""Which signals end a program."""

import signal

__all__ = ["stop_signals"]


def stop_signals() -> list[signal.Signals]:
    """Return the signals that a program should take as a request to stop.

    SIGTERM, and SIGINT unless whoever started it has it ignored: so do shells that start a program in the background of
    a script, and then Ctrl-C is meant for what runs in the foreground.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGINT]
