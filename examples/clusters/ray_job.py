"""Ray starts the ranks, and all of them again when one is lost. Needs: pip install 'ray[train]'

ray job submit --working-dir . -- python examples/clusters/ray_job.py s3://bucket/ray --workers 16

Ray runs the loop outside of the main thread of its workers, where Python allows no handler for
SIGTERM: what the ranks lose is at most what they did since the last regular save.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop(arguments: dict[str, Any]) -> None:
    """One rank; Ray has made the process group and chosen the device."""
    from train import train  # beside this file, in the folder that Ray copies

    train(**arguments, grace_seconds=25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "url", help="where the checkpoints are: a shared folder or s3://bucket/prefix"
    )
    parser.add_argument("--workers", type=int, default=2, help="ranks, one for each GPU")
    parser.add_argument("--cpu", action="store_true", help="ranks without a GPU")
    parser.add_argument("--steps", type=int, default=1000, help="of the whole training")
    parser.add_argument("--every", type=int, default=50, help="steps between saves")
    parser.add_argument("--step-seconds", type=float, default=0, help="makes each step longer")
    parser.add_argument("--results", help="where Ray writes its own notes; default: ~/ray_results")
    arguments = vars(parser.parse_args())
    workers, use_gpu = arguments.pop("workers"), not arguments.pop("cpu")
    results = arguments.pop("results")
    # Workers find train.py in the folder of this file, which `ray job submit` has copied.
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))}})
    TorchTrainer(
        loop,
        train_loop_config=arguments,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=RunConfig(
            name="shardpoint",
            storage_path=results,
            failure_config=FailureConfig(max_failures=100),
        ),
    ).fit()


if __name__ == "__main__":
    main()
