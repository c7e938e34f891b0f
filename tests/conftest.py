"""Small tensors run faster on one thread, and tests beside each other do not wait for one another."""

import torch

torch.set_num_threads(1)
