"""From torch's DCP to ours, to one file, and back to torch. Needs: pip install safetensors

To one of ours, from there to one safetensors file, and as a distributed checkpoint to torch again.

python examples/import_and_export.py runs/converted
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import ckpt
from ckpt.integrations.dcp import DcpReader, DcpWriter


def make_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has state."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_dicts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As `dcp.save` takes them."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")  # DCP warns that there is no process group
    model, optimizer = make_training()
    dcp.save(state_dicts(model, optimizer), checkpoint_id=folder / "dcp")

    root = str(folder / "run")
    ckpt.import_checkpoint(str(folder / "dcp"), root, step=1200, verify=True)
    other_model, other_optimizer = make_training()
    ckpt.load({"model": other_model, "optimizer": other_optimizer}, root)
    assert torch.equal(other_model[0].weight, model[0].weight)

    file = str(folder / "model.safetensors")
    print(ckpt.export(root, file, verify=True).tensors)
    assert torch.equal(load_file(file)["0.weight"], model[0].weight)

    # Code that is written for torch's functions reads and writes our roots by one argument.
    dcp.load(state_dicts(*make_training()), storage_reader=DcpReader(root))
    dcp.save(state_dicts(model, optimizer), storage_writer=DcpWriter(root, step=1300))
    print("steps:", [info.step for info in ckpt.list_steps(root)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
