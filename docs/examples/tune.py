"""Search a learning rate and a weight decay with Ray Tune: each trial is an ordinary run of raydali.

    python docs/examples/tune.py --data ~/pets --trials 16 --epochs 20

A trial has a GPU if there are some, or a CPU. ASHA ends the trials that fall behind. A trial that fails ends alone.
"""

import argparse
import os
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

import raydali

METRIC = "validation/top1"


def trial(config: dict[str, Any]) -> None:
    """Train one run, and report each epoch; its Ray is its own, on the node and with the GPU of the trial."""
    os.environ.pop("RAY_ADDRESS", None)
    name = f"{config['search']}-{tune.get_context().get_trial_id()}"
    drawn = {"learning_rate": config["learning_rate"], "weight_decay": config["weight_decay"]}
    raydali.train("imagenet", name=name, workers=1, ceiling=False, on_epoch=tune.report, **drawn, **config["options"])


def search(options: dict[str, Any], trials: int, space: dict[str, Any], name: str = "search") -> tune.ResultGrid:
    """Run the trials; `options` are those of the job, and `space` has the distributions of what is drawn."""
    gpus = ray.cluster_resources().get("GPU", 0)
    scheduler = ASHAScheduler(max_t=options["epochs"], grace_period=max(1, options["epochs"] // 8))
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1, "gpu": min(1, gpus)}),
        param_space={"search": name, "options": options, **space},
        tune_config=tune.TuneConfig(metric=METRIC, mode="max", num_samples=trials, scheduler=scheduler),
    )
    return tuner.fit()


def main() -> None:
    """Search on the Ray of this machine, or on the cluster that RAY_ADDRESS names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    ray.init()
    space = {"learning_rate": tune.loguniform(1e-3, 1), "weight_decay": tune.loguniform(1e-6, 1e-3)}
    results = search({"data": args.data, "epochs": args.epochs}, args.trials, space)
    best = results.get_best_result()
    print(f"best: {best.metrics} with {best.config}; {results.num_errors} of {len(results)} trials failed")


if __name__ == "__main__":
    main()
