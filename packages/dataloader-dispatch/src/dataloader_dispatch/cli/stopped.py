"""The error of a run that ends before its work is done."""


class StoppedError(Exception):
    """Something ended the run that is not the fault of its input. What is finished is kept."""
