"""``run_train.sh`` around the launcher: nodes from the environment or Slurm, and what starts again by itself."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.support.pool import free_port
from tests.support.training import tree, write_corpus

ROOT = Path(__file__).resolve().parents[2]

# In the interpreter's place: answers preflight, and writes down how it was started as the launcher.
FAKE = """#!/bin/bash
[[ $2 == torchtitan_dmuon.preflight ]] && { echo "2 0 4 a folder"; exit 0; }
echo "$*" >>launches
{launcher}
"""


def fake(tmp_path, launcher="") -> dict:
    """A copy of the script beside a fake interpreter. Returns arguments of ``subprocess``."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "conf.toml").touch()
    (tmp_path / "scripts/setup.sh").write_text(f"PYTHON={tmp_path}/python\n")
    (tmp_path / "python").write_text(FAKE.replace("{launcher}", launcher))
    (tmp_path / "python").chmod(0o755)
    shutil.copy(ROOT / "run_train.sh", tmp_path)
    inherited = {name: value for name, value in os.environ.items() if not re.match("SLURM|NNODES|NODE_|MASTER", name)}
    environment = {**inherited, "CONFIG_FILE": "conf.toml"}
    return {"args": ["bash", "run_train.sh"], "cwd": tmp_path, "env": environment, "text": True}


STEP = {
    "SLURM_JOB_ID": "4012345",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "rack[2-3]n[01-04,7],login1",
}
BATCH = {name: STEP[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES")}
OWN = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "7"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "--standalone"),
        (OWN, "--nnodes 2 --rdzv-backend c10d --rdzv-id 7 --rdzv-endpoint here:7 --rdzv-conf is_host=1"),
        (STEP, "--nnodes 3 --rdzv-backend c10d --rdzv-id 22345 --rdzv-endpoint rack2n01:22345 --rdzv-conf is_host=0"),
        ({**STEP, **OWN}, "--nnodes 2 --rdzv-backend c10d --rdzv-id 7 --rdzv-endpoint here:7 --rdzv-conf is_host=1"),
        ({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, "--standalone"),
        ({**BATCH, "NNODES": "1"}, "--standalone"),
        ({"NNODES": "2"}, "error: NNODES=2 needs MASTER_ADDR"),
        ({**STEP, "NNODES": "1"}, "error: NNODES=1, but srun has started run_train.sh on 3 nodes: they would"),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "24"},
            "error: srun has started 24 tasks on 3 nodes, but run_train.sh starts",
        ),
        (BATCH, "error: the Slurm job has 3 nodes and this is one of them: start all with srun ./run_train.sh"),
        ({"MAX_RESTARTS": "x"}, "error: MAX_RESTARTS: found 'x', expected a number of at least 0"),
    ],
)
def test_nodes(tmp_path, given, expected):
    run = fake(tmp_path)
    done = subprocess.run(**{**run, "env": {**run["env"], **given}}, capture_output=True, timeout=60)
    if expected.startswith("error"):
        assert done.returncode == 1 and done.stderr.startswith(expected), done.stderr
        assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "launches").exists()
    else:
        assert done.returncode == 0, done.stderr
        launch = f"-m torchtitan_dmuon.launch {expected} --max-restarts 0 --nproc-per-node 2 --log-dir a folder/logs "
        assert (tmp_path / "launches").read_text().startswith(launch)


@pytest.mark.parametrize(
    ("launcher", "code", "starts"),
    [
        ("kill -KILL $$", 137, 3),
        ("[[ $(wc -l <launches) == 2 ]] || kill -KILL $$", 0, 2),
        ("exit 75", 75, 3),
        ("exit 1", 1, 1),  # a rank has failed, and the launcher has started it again as often as it may
    ],
)
def test_a_killed_launcher_is_started_again(tmp_path, launcher, code, starts):
    run = fake(tmp_path, launcher)
    done = subprocess.run(**{**run, "env": {**run["env"], "MAX_RESTARTS": "2"}}, capture_output=True, timeout=60)
    launches = (tmp_path / "launches").read_text().splitlines()
    assert (done.returncode, len(launches)) == (code, starts), done.stderr
    assert not launches[0].endswith("--checkpoint.load_step -1")
    assert all(line.endswith("--checkpoint.load_step -1") for line in launches[1:])


# A shell cannot take up a signal that was ignored when it began; the launcher can.
SIGNALLED = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("saved", flush=True))
signal.signal(signal.SIGTERM, lambda *_: (print("ended", flush=True), sys.exit(75)))
print("ready", flush=True)
time.sleep(60)
sys.exit("no signal")
"""


def test_signals_reach_the_launcher_that_may_be_started_again(tmp_path):
    """SIGUSR1 goes on, SIGTERM ends: nothing is started again, whatever the exit code."""
    run = fake(tmp_path, f"exec {sys.executable} launcher.py")
    (tmp_path / "launcher.py").write_text(SIGNALLED)
    run["env"]["MAX_RESTARTS"] = "2"
    with subprocess.Popen(**run, stdout=subprocess.PIPE) as process:
        for expected, number in (("ready", signal.SIGUSR1), ("saved", signal.SIGTERM), ("ended", None)):
            assert process.stdout.readline() == f"{expected}\n"
            if number is not None:
                process.send_signal(number)
        assert process.wait(60) == 75
    assert len((tmp_path / "launches").read_text().splitlines()) == 1


# Two "nodes" on this machine, one task on each, as srun starts them.
SRUN = """#!/bin/bash
export SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost
for SLURM_NODEID in 0 1; do
    SLURM_NODEID=$SLURM_NODEID "${@:3}" >"$LOGS/node$SLURM_NODEID.log" 2>&1 &
done
wait
"""


@pytest.mark.slow
@pytest.mark.dist
def test_a_slurm_job_whose_launcher_is_killed_resumes_by_itself(tmp_path):
    """The launcher of the second node, and with it its rank; the ranks of the first node wait for new ones."""
    write_corpus(tmp_path / "corpus")
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LOGS": str(tmp_path)}
    environment |= {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "NGPU": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "MASTER_PORT": str(free_port())}
    environment |= {"CONFIG_FILE": "train_configs/debug_model.toml", "MAX_RESTARTS": "1"}
    keys = {
        "job.dump_folder": tmp_path / "out",
        "training.dataset": "text",
        "training.dataset_path": tmp_path / "corpus",
    }
    keys |= {"training.seq_len": 32, "training.local_batch_size": 1, "training.steps": 40, "metrics.log_freq": 1}
    keys |= {"checkpoint.interval": 5, "lr_scheduler.warmup_steps": 2}
    arguments = [str(part) for key, value in keys.items() for part in (f"--{key}", value)]
    job = subprocess.Popen(["bash", "scripts/slurm_train.sbatch", *arguments], cwd=ROOT, env=environment)
    try:
        first, second = tmp_path / "node0.log", tmp_path / "node1.log"
        deadline = time.monotonic() + 150
        while not (tmp_path / "out/checkpoint/step-5").exists():
            assert job.poll() is None and time.monotonic() < deadline, first.read_text() + second.read_text()
            time.sleep(0.05)
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in tree(job.pid)}
        (launcher,) = [pid for pid, words in commands.items() if "is_host=0" in words and words[0] == sys.executable]
        os.kill(launcher, signal.SIGKILL)
        assert job.wait(240) == 0, first.read_text() + second.read_text()
    finally:
        for pid in tree(job.pid) if job.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
    assert "the launcher of this node has ended with exit code 137; 1 restarts are left" in second.read_text()
    resumed = int(re.findall(r"Resumed from checkpoint .*step-(\d+)", first.read_text())[0])
    assert resumed >= 5 and f"Training from step {resumed + 1} to 40" in first.read_text()
    assert (tmp_path / "out/checkpoint/step-40").is_dir()


SCRIPTS = ["run_train.sh", *(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.s[bh]*"))]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck(script):
    done = subprocess.run(["shellcheck", "-x", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_kubernetes_manifest():
    spec = yaml.safe_load((ROOT / "scripts/k8s_pytorchjob.yaml").read_text())["spec"]["pytorchReplicaSpecs"]
    pods = [replicas["template"]["spec"]["containers"][0] for replicas in spec.values()]
    assert pods[0] == pods[1] and pods[0]["name"] == "pytorch"
    environment = {entry["name"]: entry["value"] for entry in pods[0]["env"]}
    assert int(environment["NNODES"]) == sum(replicas["replicas"] for replicas in spec.values())
    assert (ROOT / environment["CONFIG_FILE"]).exists()
