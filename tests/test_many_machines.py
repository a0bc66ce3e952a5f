"""Files that start a run on several machines: what can be checked of them without such machines."""

import json
import os
import re
import secrets
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from transformers import Qwen2Config

from tests.flows import tiny
from tests.flows.test_lost_node import free_port
from tilth.cli.layout import as_object, look
from tilth.cluster.backends.capacity import patience
from tilth.config.checks import pools
from tilth.config.load import load_recipe
from tilth.data.tokenizer import Tokenizer
from tilth.runs.readers import read_state

FOLDER = Path(__file__).parents[1] / "docs" / "cluster"
RECIPE = FOLDER / "qwen2.5-7b-grpo.toml"


@pytest.mark.parametrize("name", ["ssh.sh", "slurm.sbatch"])
def test_scripts_are_valid_shell(name):
    subprocess.run(["bash", "-n", FOLDER / name], check=True)


def test_the_recipe_fills_the_cluster_of_each_file():
    recipe = load_recipe(str(RECIPE))
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


def test_the_recipe_fits_gpus_of_80_gb_by_prediction_as_its_page_says(tmp_path):
    """With the shape of Qwen2.5-7B, a small tokenizer in place of its own, and prompts that fill the context."""
    shape = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    made = Qwen2Config(vocab_size=152_064, num_key_value_heads=4, tie_word_embeddings=False, **shape)
    made.architectures = ["Qwen2ForCausalLM"]
    made.save_pretrained(tmp_path)
    Tokenizer.characters("abcdefghijklmnopqrstuvwxyz 0123456789#").save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    plans = []
    for words in (1000, 25):
        record = {"question": "abc " * words, "answer": "#### 3"}
        (tmp_path / "train.jsonl").write_text(f"{json.dumps(record)}\n" * 100)
        keys = [f"model.path={tmp_path}", f"data.source={tmp_path / 'train.jsonl'}"]
        plans.append(as_object(look(load_recipe(str(RECIPE), keys))))
    plan, short = plans
    assert plan["longest"] == 4096 and 7.6e9 < plan["parameters"] < 7.7e9  # as its model card: 7.61B
    states = 12 * plan["parameters"] / 32  # fp32 parameters and two moments, divided
    assert len(plan["ranks"]) == 32 and all(states < rank["peak"] < 80e9 for rank in plan["ranks"])
    most, least = (max(rank["peak"] for rank in one["ranks"]) / 1e9 for one in (plan, short))
    sentence = (
        f"predicts {most:.1f} GB a GPU with prompts that fill the context, {least:.1f} with prompts of 100 tokens"
    )
    assert sentence in " ".join((FOLDER.parent / "many-machines.md").read_text().split())
    assert f"# {most:.0f} GB a GPU predicted" in RECIPE.read_text()


SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -w || $1 == -x ]] && shift; shift; done
case "$1" in
  hostname) echo 10.0.0.1;;
  ray) sleep 0.3; echo " 1 node_of_this_cluster" >> "$NODES"; echo "$*" >> "$LOG"; exec sleep 5 2> /dev/null;;
esac
"""
RAY = '#!/bin/bash\n[[ -e $NODES ]] || exit 1\necho Active:; cat "$NODES"\n'


def slurm(folder, **more):
    """Run the script for two nodes with stand-ins for Slurm, Ray and tilth; return the process and the log."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    programs = {"srun": SRUN, "ray": RAY, "scontrol": "#!/bin/bash\necho a\necho b\n",
                "tilth": '#!/bin/bash\necho "$(wc -l < "$NODES") nodes: tilth $*" >> "$LOG"\n'}  # fmt: skip
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_ID": "7",
           "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NUM_NODES": "2", "NODES": str(folder / "nodes"),
           "LOG": str(folder / "log"), **more}  # fmt: skip
    script = ["bash", FOLDER / "slurm.sbatch", "r.toml"]
    done = subprocess.run(script, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return done, (folder / "log").read_text().splitlines()


def test_slurm_runs_the_recipe_once_ray_sees_all_nodes(tmp_path):
    done, log = slurm(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--head" in log[0] and "--address=10.0.0.1:20007" in log[1]
    assert log[2] == "2 nodes: tilth run r.toml cluster.backend=ray cluster.address=10.0.0.1:20007"


def test_slurm_ends_where_nodes_are_missing(tmp_path):
    done, log = slurm(tmp_path, SLURM_JOB_NUM_NODES="4", PATIENCE="2")
    assert done.returncode == 1 and "Ray sees 2 of 4 nodes" in done.stderr and not any("tilth" in line for line in log)


APART = """
mount -t tmpfs tmpfs /dev/shm && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && "$@"
ps -A -o args= | grep -E "raylet|gcs_server" | grep -v grep > "$LEFT" || true
"""
SSH = """#!/bin/bash
shift
case "$1" in *"tilth run"*)  # what Ray shows is some seconds behind what has joined
  for second in {1..60}; do
    .venv/bin/ray status --address=127.0.0.1:$PORT > "$STATUS"
    [ "$(grep -c '^ 1 node_' "$STATUS")" = 2 ] && break
    sleep 1
  done;;
esac
exec bash -c "$1"
"""


@pytest.mark.ray
@pytest.mark.dist
@pytest.mark.slow
def test_ssh_trains_on_two_nodes_of_a_real_cluster(tmp_path):
    """With an ``ssh`` that runs its command here, in processes that see no others: ``ray stop`` ends all it sees."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed (pip install '.[ray]')")
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("nodes on one machine need processes of their own (unshare --pid)")
    folder = tmp_path / "shared"
    (folder / "here").mkdir(parents=True)
    (folder / ".venv").symlink_to(Path(sys.prefix))
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    made = tiny.settings(folder / "here", supervised={"steps": 1}, algorithm={"steps": 1}, run={"name": "many"})
    keys = [f"{name}.{key}={json.dumps(value)}" for name, section in made.items() if isinstance(section, dict)
            for key, value in section.items()]  # fmt: skip
    port = str(free_port())
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env = clean | {
        "SSH": str(tmp_path / "ssh"), "PORT": port, "STATUS": str(tmp_path / "status"), "LEFT": str(tmp_path / "left"),
        "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1] / "src"),
    }  # fmt: skip
    command = [*unshare, "bash", "-ec", APART, "apart", "bash", FOLDER / "ssh.sh", "one two", "addition-grpo", *keys]
    command += ["cluster.workers=2", "policy.layout.fsdp=2"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=patience(540.0))
    assert done.returncode == 0, done.stderr[-4000:]
    state = read_state(folder / "here" / "many")
    assert state["state"] == "finished" and (folder / "here" / "many" / "report.html").exists()
    assert len(re.findall("^ 1 node_", (tmp_path / "status").read_text(), re.M)) == 2  # as slurm.sbatch counts them
    assert (tmp_path / "left").read_text() == ""
