"""Resume the training of `train_fsdp2.py` on another number of ranks. Nothing has to be converted.

torchrun --nproc-per-node 2 examples/resume_other_world_size.py runs/example
"""

import sys

from train_fsdp2 import train

if __name__ == "__main__":
    # The program is the same. Each rank reads the parts of the old shards that are in its new ones.
    train(sys.argv[1], steps=10)
