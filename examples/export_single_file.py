"""Turn the latest checkpoint into one file, used without us. Needs: pip install safetensors

python examples/export_single_file.py runs/example model.safetensors
"""

import sys

from safetensors.torch import load_file
from torch import nn

import ckpt

url, target = sys.argv[1:]
report = ckpt.export(url, target)
print(f"step {report.step}: {len(report.tensors)} tensors, {report.nbytes} bytes in {target}")

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
model.load_state_dict(load_file(target), strict=True)

# One tensor, or a part of one, needs no export and no process group.
with ckpt.open(url) as checkpoint:
    print(checkpoint, checkpoint.read("model.0.weight", (slice(0, 2), slice(0, 3))))
