"""Name and exit codes of the program."""

PROG = "llama-pretrain"
EXIT_ABORTED = 1
EXIT_USER_ERROR = 2
EXIT_RESUMABLE = 75
"""As in `trainer_core`, which imports torch."""
EXIT_INTERRUPTED = 130
