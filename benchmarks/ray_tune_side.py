"""Ray Tune's side of the comparison, in a process of its own, which says nothing but its answers.

python ray_tune_side.py FOLDER      reads requests and writes answers, a JSON object a line

{"trivial": 100, "reports": 1}          trials that only report
{"study": [..], "deadline_s": 12}       configurations to tune with ASHA until the deadline
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SLOTS = 2


def _quietly() -> Any:
    """Answers go to the original standard output; everything else that is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def trivial(config: dict[str, Any]) -> None:
    from ray import tune  # noqa: PLC0415 - in a process of Ray's

    for number in range(config["reports"]):
        tune.report({"accuracy": config["x"] + number})


def digits(config: dict[str, Any]) -> None:
    from ray import tune  # noqa: PLC0415
    from ray_tune_train import EPOCHS, Digits  # noqa: PLC0415

    trained = Digits(config["of"])
    for _epoch in range(EPOCHS):
        for images, labels in trained.loader:
            trained.step(images, labels)
        tune.report({"accuracy": trained.accuracy()})


class Side:
    """Ray Tune on as many slots as Stretto has."""

    def __init__(self, folder: Path) -> None:
        import ray  # noqa: PLC0415 - so that its absence can be told
        from ray import tune  # noqa: PLC0415

        self._tune = tune
        self._folder = folder
        self._fits = 0
        began_s = time.monotonic()
        here = str(Path(__file__).parent)
        ray.init(
            address="local",
            num_cpus=SLOTS,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": here, "OMP_NUM_THREADS": "1"}},
        )
        self.init_s = time.monotonic() - began_s

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        tune = self._tune
        if "trivial" in request:
            space = {"x": tune.uniform(0.0, 1.0), "reports": request["reports"]}
            return self._fit(trivial, space, num_samples=request["trivial"])
        return self._fit(
            digits,
            {"of": tune.grid_search(request["study"])},
            num_samples=1,
            time_budget_s=request["deadline_s"],
            scheduler=tune.schedulers.ASHAScheduler(
                max_t=request["epochs"], grace_period=1, reduction_factor=3
            ),
        )

    def _fit(self, objective: Any, space: dict[str, Any], **config: Any) -> dict[str, Any]:
        tune = self._tune
        self._fits += 1
        clock = _Clock(tune.Callback)
        tuner = tune.Tuner(
            tune.with_resources(objective, {"cpu": 1}),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="accuracy", mode="max", reuse_actors=True, max_concurrent_trials=SLOTS, **config
            ),
            run_config=tune.RunConfig(
                name=f"fit-{self._fits}",
                storage_path=str(self._folder),
                verbose=0,
                callbacks=[clock.callback],
            ),
        )
        began_s = time.monotonic()
        results = tuner.fit()
        ended_s = time.monotonic()
        reached = [one.metrics_dataframe["accuracy"].max() for one in results if "accuracy" in one.metrics]
        return {
            "init_s": self.init_s,
            "fit_s": ended_s - began_s,
            "first_s": clock.first_s - began_s if clock.first_s else None,
            "last_s": clock.last_s - began_s if clock.last_s else None,
            "trials": len(results),
            "errors": results.num_errors,
            "best": float(max(reached, default=0.0)),
        }


class _Clock:
    """When the first and the last result came."""

    def __init__(self, base: type) -> None:
        self.first_s = self.last_s = 0.0
        outer = self

        class Callback(base):  # type: ignore[misc]  # Ray's
            def on_trial_result(self, *_: object, **__: object) -> None:
                outer.last_s = time.monotonic()
                outer.first_s = outer.first_s or outer.last_s

        self.callback = Callback()


def main() -> None:
    answers = _quietly()
    side = Side(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(side.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
