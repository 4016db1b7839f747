"""Run all examples as their first lines say, in a temporary folder; part of the checks.

python -m examples.run_all
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Raises CalledProcessError for the first example that fails."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with tempfile.TemporaryDirectory() as folder:
        root, target = f"{folder}/run", f"{folder}/model.safetensors"
        for command in (
            [*torchrun, "4", str(HERE / "train_fsdp2.py"), root],
            [*torchrun, "2", str(HERE / "resume_other_world_size.py"), root],
            [sys.executable, str(HERE / "export_single_file.py"), root, target],
            [*torchrun, "2", str(HERE / "train_sharded.py"), f"{folder}/sharded"],
            [*torchrun, "4", str(HERE / "train_sharded.py"), f"{folder}/hybrid", "hybrid"],
            [*torchrun, "2", str(HERE / "move_from_torch.py"), f"{folder}/moved"],
            [*torchrun, "2", str(HERE / "train_service.py"), f"{folder}/service"],
            [*torchrun, "1", str(HERE / "train_service.py"), f"{folder}/service"],
            [
                *torchrun,
                "2",
                str(HERE / "clusters" / "train.py"),
                f"{folder}/cluster",
                "--steps=60",
            ],
            [*torchrun, "2", str(HERE / "own_engine.py"), f"{folder}/columns"],
            [*torchrun, "3", str(HERE / "own_engine.py"), f"{folder}/columns"],
            [sys.executable, str(HERE / "own_store.py"), f"{folder}/objects.db"],
            [sys.executable, str(HERE / "share_a_root.py")],
            [sys.executable, str(HERE / "rl_loop.py"), f"{folder}/rl"],
            [sys.executable, str(HERE / "requantize.py")],
            [sys.executable, str(HERE / "lora_dedup.py"), f"{folder}/lora"],
            [sys.executable, str(HERE / "import_and_export.py"), f"{folder}/converted"],
            [*torchrun, "2", str(HERE / "frameworks" / "recipe.py"), f"{folder}/recipe", "6"],
            [*torchrun, "2", str(HERE / "frameworks" / "pipeline.py"), f"{folder}/stages", "6"],
            [*torchrun, "1", str(HERE / "frameworks" / "pipeline.py"), f"{folder}/stages", "9"],
            [sys.executable, str(HERE / "huggingface_trainer.py"), f"{folder}/trainer"],
            [sys.executable, str(HERE / "lightning_trainer.py"), f"{folder}/lightning"],
        ):
            print("+", " ".join(command[1:]), flush=True)
            subprocess.run(command, check=True, timeout=300)


if __name__ == "__main__":
    main()
