"""Name and exit codes of the program."""

PROG = "llama-pretrain"
EXIT_ABORTED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
