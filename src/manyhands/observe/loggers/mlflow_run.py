"""MLflow logger: an MLflow run with the plan as its parameters and all numbers by step.

It goes to MLFLOW_TRACKING_URI; without that, into `mlflow.db` of the run directory:

    mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.observe.loggers.scalar_sink import keep, recall
from manyhands.observe.loggers.scalars import LoggedPoint

AT_ONCE = 100  # parameters that one request may hold
LONGEST = 500  # characters of a parameter


class MlflowRun:
    """MLflow logger. `experiment`: the name of the run's script, unless MLFLOW_EXPERIMENT_NAME says
    another."""

    def __init__(self, directory: Path, experiment: str, env: Mapping[str, str]):
        self._directory = Path(directory)
        self._experiment = env.get("MLFLOW_EXPERIMENT_NAME") or experiment
        local = f"sqlite:///{self._directory.resolve()}/mlflow.db"
        self._uri = env.get("MLFLOW_TRACKING_URI") or local
        self._client: Any = None
        self._run_id = ""

    def begin(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        known = recall(self._directory, "mlflow")
        if known.get("uri") == self._uri:
            self._run_id = known["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            found = self._client.get_experiment_by_name(self._experiment)
            number = (
                self._client.create_experiment(self._experiment, self._artifacts())
                if found is None
                else found.experiment_id
            )
            run = self._client.create_run(number, run_name=self._directory.name)
            self._run_id = run.info.run_id
            keep(self._directory, "mlflow", {"uri": self._uri, "run_id": self._run_id})
        # a parameter of a run cannot change: one that is resumed otherwise keeps its first
        before = self._client.get_run(self._run_id).data.params
        new = [Param(_key(k), str(v)[:LONGEST]) for k, v in config.items() if _key(k) not in before]
        for i in range(0, len(new), AT_ONCE):
            self._client.log_batch(self._run_id, params=new[i : i + AT_ONCE])

    def log(self, point: LoggedPoint) -> None:
        from mlflow.entities import Metric

        values = {**point.values, **({} if point.epoch is None else {"epoch": point.epoch})}
        time_ms = int(point.time_s * 1000)
        metrics = [Metric(_key(k), float(v), time_ms, point.step) for k, v in values.items()]
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)

    def end(self, finished: bool) -> None:
        if self._run_id:
            self._client.set_terminated(self._run_id, "FINISHED" if finished else "FAILED")

    def _artifacts(self) -> str | None:
        """Where artifacts go, which a database does not keep itself."""
        local = self._uri.startswith("sqlite:")
        return str(self._directory.resolve() / "mlartifacts") if local else None


def _key(name: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)
