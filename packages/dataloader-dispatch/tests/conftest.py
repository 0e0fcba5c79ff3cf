"""One thread per operation: on a busy machine several wait for one another longer than they save."""

import torch

torch.set_num_threads(1)
