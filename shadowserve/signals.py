"""Stop signals of a program."""

import signal


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a program: SIGTERM, and SIGINT unless it is ignored.

    Shells ignore SIGINT for background programs of a script: there Ctrl-C is for the foreground program.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGINT]
