"""What the program ends with: its exit codes, and which error has which of them."""

from __future__ import annotations

from errno import EDQUOT, EFBIG, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC

PROG = "llama-pretrain"
EXIT_ABORTED = 1
EXIT_USER_ERROR = 2
EXIT_RESUMABLE = 75
"""As in `trainer_core`, which imports torch."""
EXIT_INTERRUPTED = 130

_MACHINE_ERRORS = (ENOSPC, EDQUOT, EFBIG, EIO, ENOMEM, EMFILE, ENFILE)


class BrokenRunError(RuntimeError):
    """A run that had begun could not continue, as on a full disk: other input would not change that."""


def exit_code_of(error: Exception) -> int | None:
    """The exit code of an error that is told in one line; None for any other, which is a mistake of ours.

    Of the errors that another process of the job has caused, `is_of_another_rank` tells.
    """
    from trainer_core import ConfigurationError

    if isinstance(error, ConfigurationError):  # before anything that imports torch for it
        return EXIT_ABORTED if _is_of_the_machine(error) else EXIT_USER_ERROR
    from checkpoint_core import CheckpointError, LeaseLostError
    from dataloader_dispatch import DataError
    from dist_env import DistributedEnvironmentError
    from trainer_core import DataError as TrainerDataError

    if is_of_another_rank(error) or isinstance(error, BrokenRunError | LeaseLostError):
        return EXIT_ABORTED
    if isinstance(
        error, DataError | TrainerDataError | CheckpointError | DistributedEnvironmentError | OSError
    ):
        return EXIT_ABORTED if _is_of_the_machine(error) else EXIT_USER_ERROR
    return None


def is_of_another_rank(error: Exception) -> bool:
    """Whether another process of the job is why this one cannot continue."""
    from checkpoint_core import LostRankError
    from dist_env import RankFailedError, RankTimeoutError

    return isinstance(error, RankFailedError | RankTimeoutError | LostRankError)


def _is_of_the_machine(error: BaseException | None) -> bool:
    """Whether the system refused room or a device failed: other input would not change that."""
    seen: set[int] = set()
    # An error that is raised again while it is handled elsewhere can be in its own context.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _MACHINE_ERRORS:
            return True
        error = error.__cause__ or error.__context__
    return False
