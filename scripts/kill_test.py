"""Kill a training run again and again and show that nothing is lost: minutes on two cores, no GPU.

    python scripts/kill_test.py [--kills 20] [--seed 0] [--folder outputs/kill_test]

A run on 4 processes is killed at random moments (SIGKILL of one process, SIGTERM of all, both also in the middle of a
save and before the first step) and started again on 1, 2 or 4 processes, with every `checkpoint.async_mode`. Every
process keeps a journal of its steps: loss to the last bit and a digest of every sample. At the end:

1. steps lost by a kill are at most `checkpoint.interval` (twice that when saves run behind the training), by SIGTERM
   none;
2. the samples of every step are those of a run that was never stopped, and none occurs twice;
3. for every stretch of restarts on one number of processes, a run from the checkpoint at its beginning that is never
   stopped gives the same losses to the last bit.
"""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

INTERVAL = 4
ENDLESS = 100_000
MODES = ("disabled", "async", "async_with_pinned_mem")


# ------------------------------------------------------------------ one process of a run


def worker(journal: str, argv: list[str]) -> int:
    """`train.py` that writes a line a step to `<journal>-<rank>.jsonl`."""
    import torch

    import train
    from torchtitan_dmuon.trainer import Trainer

    class Recorded(Trainer):
        def train_step(self, batches: Iterator[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
            samples: list[int] = []

            def recorded() -> Iterator[dict[str, torch.Tensor]]:
                for batch in batches:
                    samples.extend(zlib.crc32(row.numpy().tobytes()) for row in batch["input"])
                    yield batch

            loss, grad_norm = super().train_step(recorded())
            entry = {"step": self.step, "loss": loss.item().hex(), "norm": grad_norm.item().hex(), "samples": samples}
            with open(f"{journal}-{self.rank}.jsonl", "a") as file:
                file.write(json.dumps(entry) + "\n")
            return loss, grad_norm

    return train.main(argv, Recorded)


# ------------------------------------------------------------------ one life of the run


@dataclass
class Life:
    """One start of the run.

    Attributes:
        world: number of processes.
        mode: `checkpoint.async_mode`.
        kill: what ended it, in words.
        resumed: step of the checkpoint it started from.
        began: whether it got so far as to load it.
        losses, norms: hexadecimal, by step, of the processes that got so far.
        samples: digests by step, of all processes.
    """

    world: int
    mode: str
    kill: str
    resumed: int = 0
    began: bool = False
    losses: dict[int, tuple[str, str]] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return max(self.losses, default=self.resumed)

    def read(self, journal: Path) -> None:
        """Only steps that every process has written count: the others were cut off."""
        entries: list[dict[int, dict]] = []
        for rank in range(self.world):
            path = journal.with_name(f"{journal.name}-{rank}.jsonl")
            lines = path.read_text().splitlines() if path.exists() else []
            parsed = [json.loads(line) for line in lines if line.endswith("]}")]
            entries.append({entry["step"]: entry for entry in parsed})
        for step in sorted(set.intersection(*(set(found) for found in entries))):
            self.losses[step] = (entries[0][step]["loss"], entries[0][step]["norm"])
            self.samples[step] = [digest for found in entries for digest in found[step]["samples"]]


class Runner:
    """Starts lives in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "run" / "checkpoint"
        self._count = 0

    def arguments(self, out: str, **overrides: object) -> list[str]:
        keys = {
            "job.config_file": "train_configs/debug_model.toml",
            "job.dump_folder": self.folder / out,
            "training.dataset": "text",
            "training.dataset_path": self.folder / "corpus" / "*.txt",
            "training.seq_len": 32,
            "training.local_batch_size": 2,
            "training.global_batch_size": 8,
            "training.steps": ENDLESS,
            "training.gc_freq": 10,
            "lr_scheduler.total_steps": ENDLESS,
            "metrics.log_freq": 1000,
            "checkpoint.interval": INTERVAL,
            "checkpoint.keep_latest_k": 0,
        }
        keys |= {key.replace("__", "."): value for key, value in overrides.items()}
        return [part for key, value in keys.items() for part in (f"--{key}", str(value))]

    def start(self, world: int, arguments: list[str]) -> tuple[subprocess.Popen, Path, Path]:
        """(launcher, its journal, its log)."""
        self._count += 1
        journal = self.folder / "journal" / f"{self._count:03d}"
        log = journal.with_suffix(".log")
        command = [sys.executable, "-m", "torchtitan_dmuon.launch", "--standalone", "--nproc-per-node", str(world)]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, str(Path(__file__).resolve()), "worker", str(journal), *arguments],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return process, journal, log

    def whole(self, world: int, **overrides: object) -> Life:
        """A life that nothing ends."""
        process, journal, log = self.start(world, self.arguments(**overrides))
        if process.wait(600) != 0:
            raise SystemExit(f"a run without kills failed: see {log}")
        life = Life(world, "disabled", "nothing")
        life.read(journal)
        return life

    def killed(self, life: Life, moment: str, random_moment: random.Random) -> None:
        """Start `life` and end it at `moment`: start, step or save."""
        process, journal, log = self.start(life.world, self.arguments("run", checkpoint__async_mode=life.mode))
        deadline = time.monotonic() + 120

        def wait_until(happened) -> None:
            while not happened():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the run ended by itself or does not move: see {log}")
                time.sleep(0.001)

        first = journal.with_name(f"{journal.name}-0.jsonl")
        if moment == "start":
            wait_until(lambda: len(_children(process.pid)) == life.world)
            time.sleep(random_moment.uniform(0, 4))
        else:
            wait_until(first.exists)
            time.sleep(random_moment.uniform(0, 3))
        if moment == "save":
            # One left by the life before is there until this one cleans up, at its first save.
            old = {path: path.stat().st_ino for path in self.checkpoints.glob("*.incomplete")}
            wait_until(lambda: any(old.get(p) != _inode(p) for p in self.checkpoints.glob("*.incomplete")))
            time.sleep(random_moment.choice((0, 0, 0.01, 0.03)))
        if life.kill == "SIGKILL of one":
            children = _children(process.pid)
            if children:
                os.kill(random_moment.choice(children), signal.SIGKILL)
        else:
            process.send_signal(signal.SIGTERM)
        code = process.wait(120)
        life.read(journal)
        text = log.read_text()
        resumed = re.search(r"Resumed from checkpoint .*step-(\d+)", text)
        life.resumed = int(resumed[1]) if resumed else 0
        life.began = bool(resumed or life.losses)
        if life.kill == "SIGTERM" and moment != "start" and code != 0:
            raise SystemExit(f"SIGTERM ended with exit code {code}, not 0: see {log}")


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _children(pid: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(child) for child in listed.split()]


# ------------------------------------------------------------------ the ordeal and its verdict


def ordeal(runner: Runner, kills: int, chance: random.Random) -> list[Life]:
    lives: list[Life] = []
    world = 4
    for number in range(kills + 1):
        life = Life(world, chance.choice(MODES), chance.choice(("SIGKILL of one", "SIGKILL of one", "SIGTERM")))
        moment = chance.choice(("step", "step", "save", "save", "start"))
        if number == kills:  # the end: everything so far is saved
            life.kill, moment = "SIGTERM", "step"
        runner.killed(life, moment, chance)
        lives.append(life)
        where = f"resumed from {life.resumed}, ended after {life.last}" if life.began else "ended before it loaded"
        say(f"{number + 1:3d}: {world} processes, {life.mode}, {life.kill} ({moment}): {where}")
        world = world if chance.random() < 0.5 else chance.choice((1, 2, 4))
    return lives


def check_lost(lives: list[Life]) -> None:
    most = {"SIGTERM": 0, "SIGKILL of one": 0}
    reached, kill, allowed = 0, "SIGTERM", 0
    for life, following in itertools.pairwise(lives):
        if life.losses:  # else it was killed before its first step and has lost nothing of its own
            reached, kill = life.last, life.kill
            allowed = 0 if kill == "SIGTERM" else INTERVAL * (1 if life.mode == "disabled" else 2)
        lost = reached - following.resumed
        if lost > allowed:
            raise SystemExit(f"FAILED: {lost} steps were lost by {kill} ({life.mode}), allowed are {allowed}")
        most[kill] = max(most[kill], lost)
    say(f"steps lost: at most {most['SIGKILL of one']} by SIGKILL (interval {INTERVAL}), {most['SIGTERM']} by SIGTERM")


def check_data(lives: list[Life], reference: Life) -> None:
    """Every life's samples of every step, so also those that are not built upon."""
    final: dict[int, list[int]] = {}
    for life in lives:
        if any(step not in final for step in range(1, life.resumed + 1)):
            raise SystemExit(f"FAILED: a life began after step {life.resumed}, which no life before has reached")
        for step, samples in life.samples.items():
            if sorted(samples) != sorted(reference.samples[step]):
                raise SystemExit(f"FAILED: step {step} read other samples than a run that was never stopped")
        final = {step: samples for step, samples in final.items() if step <= life.resumed} | life.samples
    stream = [digest for step in range(1, max(final) + 1) for digest in final[step]]
    if len(set(stream)) != len(stream):
        raise SystemExit("FAILED: a sample occurs twice")
    say(f"data: {len(stream)} samples of {max(final)} steps, no gap, no repeat, as in a run that was never stopped")


def check_losses(runner: Runner, lives: list[Life], reference: Life) -> None:
    chains: list[list[Life]] = []
    for life in lives:
        if chains and chains[-1][-1].world == life.world:
            chains[-1].append(life)
        else:
            chains.append([life])
    compared = restarts = 0
    for number, chain in enumerate(chain for chain in chains if len(chain) > 1):
        begin, end = chain[0].resumed, max(life.last for life in chain)
        if end == begin:
            continue
        if begin == 0 and chain[0].world == reference.world:
            whole = reference
        else:
            whole = runner.whole(
                chain[0].world,
                out=f"replay-{number}",
                checkpoint__initial_load_path=runner.checkpoints / f"step-{begin}",
                checkpoint__initial_load_model_only=False,
                checkpoint__load_only=True,
                training__steps=end,
            )
        for life in chain:
            restarts += life is not chain[0]
            for step, losses in life.losses.items():
                if losses != whole.losses[step]:
                    raise SystemExit(
                        f"FAILED: step {step} on {life.world} processes has loss {losses[0]}, without a stop it is "
                        f"{whole.losses[step][0]}"
                    )
                compared += 1
    say(f"losses: {compared} steps around {restarts} same-mesh restarts, all bitwise those of runs never stopped")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "kill_test", help="is emptied first")
    arguments = parser.parse_args(argv)
    folder = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "journal").mkdir(parents=True)
    (folder / "corpus").mkdir()
    for index in range(40):
        lines = (f"line {line} of text {index}: {line * 7919 % 1009} and {line * index % 97}\n" for line in range(200))
        (folder / "corpus" / f"{index:02d}.txt").write_text("".join(lines))

    begin = time.monotonic()
    runner = Runner(folder)
    lives = ordeal(runner, arguments.kills, random.Random(arguments.seed))
    say(f"{arguments.kills} kills in {time.monotonic() - begin:.0f} s; now the runs that are never stopped")
    lives = [life for life in lives if life.began]
    check_lost(lives)
    last = max(life.last for life in lives)
    reference = runner.whole(4, out="reference", training__steps=last, checkpoint__enable=False)
    check_data(lives, reference)
    check_losses(runner, lives, reference)
    say(f"passed in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    import environment  # noqa: F401

    if sys.argv[1:2] == ["worker"]:
        sys.exit(worker(sys.argv[2], sys.argv[3:]))
    sys.exit(main(sys.argv[1:]))
