"""The errors of the expert histogram.

HistogramError
|- HistogramArgumentError(ValueError)        an argument breaks a rule
`- BackendUnavailableError(RuntimeError)     the chosen backend cannot run here
"""


class HistogramError(Exception):
    """Base of every error that this folder raises on purpose."""


class HistogramArgumentError(HistogramError, ValueError):
    """An argument breaks a rule; the message names argument, value and rule."""


class BackendUnavailableError(HistogramError, RuntimeError):
    """The chosen backend cannot run in this process; nothing else is tried."""
