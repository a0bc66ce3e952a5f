"""Files that start a run on several machines: what can be checked of them without such machines."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tilth.config.checks import pools
from tilth.config.load import load_recipe

FOLDER = Path(__file__).parents[1] / "docs" / "cluster"


@pytest.mark.parametrize("name", ["ssh.sh", "slurm.sbatch"])
def test_scripts_are_valid_shell(name):
    subprocess.run(["bash", "-n", FOLDER / name], check=True)


def test_the_recipe_fills_the_cluster_of_each_file():
    recipe = load_recipe(str(FOLDER / "qwen2.5-7b-grpo.toml"))
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert job["kind"] == "RayJob"
    gpus = group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert recipe.cluster.workers == sum(pools(recipe).values()) == gpus == 32
    assert "--nodes=4" in (text := (FOLDER / "slurm.sbatch").read_text()) and "--gpus-per-node=8" in text


def test_ssh_starts_a_head_and_its_nodes_runs_the_recipe_there_and_stops_all(tmp_path):
    """With an ``ssh`` that writes down what it is asked."""
    ssh, log = tmp_path / "ssh", tmp_path / "log"
    ssh.write_text(f'#!/bin/bash\necho "$*" >> {log}\ncase "$2" in hostname*) echo 10.0.0.1;; esac\n')
    ssh.chmod(0o755)
    command = ["bash", FOLDER / "ssh.sh", "a b", "my recipe.toml", "seed=1"]
    subprocess.run(command, env={"PATH": "/usr/bin:/bin", "SSH": str(ssh)}, check=True)
    asked = log.read_text().splitlines()
    assert [line.split()[0] for line in asked] == ["a", "a", "b", "a", "a", "b"]
    assert "ray start --head --node-ip-address=10.0.0.1" in asked[1] and "--address=10.0.0.1:6379" in asked[2]
    assert "tilth run my\\ recipe.toml seed=1 cluster.backend=ray cluster.address=10.0.0.1:6379" in asked[3]
    assert all(line.endswith("ray stop --force") for line in asked[4:])
