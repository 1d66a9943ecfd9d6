"""Each file that has a JSON Schema, against it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from cluster.checks.outcome import Outcome, outcome

OWN = {
    "kuberay/rayjob.yaml": "kuberay/schema/rayjob.json",
    "kuberay/raycronjob.yaml": "kuberay/schema/raycronjob.json",
    "npd/raytest.json": "npd/schema.json",
}


def checks(folder: Path) -> list[Outcome]:
    """KubeRay and node-problem-detector by schemas of ours; Ray's and GitHub's by theirs."""
    return [check_file(folder, file) for file in (*OWN, "github/nightly.yml", "ray-cluster.yaml")]


def check_file(folder: Path, file: str) -> Outcome:
    """One file against its schema, by check-jsonschema."""
    if file in OWN:
        return _against(folder, file, "--schemafile", folder / OWN[file])
    if file == "github/nightly.yml":
        return _against(folder, file, "--builtin-schema", "vendor.github-workflows")
    ray = importlib.util.find_spec("ray")
    if ray is None or ray.origin is None:
        return Outcome(file, "schema", skipped="Ray is not installed")
    schema = Path(ray.origin).parent / "autoscaler" / "ray-schema.json"
    return _against(folder, file, "--schemafile", schema)


def _against(folder: Path, file: str, *schema: str | Path) -> Outcome:
    from check_jsonschema import main
    from click.testing import CliRunner

    # In this process: its imports take longer than its work.
    done = CliRunner().invoke(main, [*map(str, schema), str(folder / file)])
    return outcome(file, "schema", [] if done.exit_code == 0 else done.output.splitlines())
