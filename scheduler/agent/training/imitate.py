"""The warm start's training loop."""

import json
import math
import multiprocessing as mp
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from scheduler.agent.training.files import save
from scheduler.agent.training.network import Network
from scheduler.agent.training.teacher import Lesson, lessons, loss_of


@dataclass(frozen=True, slots=True)
class Settings:
    """How the warm start is run; a lesson has about `tokens` (layer, type) pairs.

    From step `alone` on, every other episode is the student's own.
    """

    steps: int = 5200
    tokens: int = 9000
    most_layers: int = 80
    most_types: int = 8
    alone: int = 1200
    learning_rate: float = 2e-3
    softness: float = 0.002
    regret_weight: float = 5.0
    seed: int = 11


def imitate(
    network: Network, settings: Settings, directory: Path, report: Callable[[str], None]
) -> None:
    """Teach the network; leaves `student.safetensors` and `imitation.jsonl` in `directory`."""
    student = directory / "student.safetensors"
    student.unlink(missing_ok=True)
    context: Any = mp.get_context("spawn")
    queue = context.Queue(6)
    teacher = context.Process(target=_teach, args=(queue, settings, student), daemon=True)
    teacher.start()
    optimiser = torch.optim.AdamW(
        network.parameters(), settings.learning_rate, (0.9, 0.98), weight_decay=1e-3
    )
    started = time.monotonic()
    mean: list[float] = []
    try:
        with (directory / "imitation.jsonl").open("w") as curve:
            for step in range(settings.steps):
                lesson: Lesson = queue.get(timeout=600)
                cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
                rate = settings.learning_rate * min(1.0, (step + 1) / 100) * (0.01 + 0.99 * cosine)
                for group in optimiser.param_groups:
                    group["lr"] = rate
                parts = loss_of(network, lesson, settings.softness)
                loss = parts[0] + parts[1] + settings.regret_weight * parts[2]
                optimiser.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimiser.step()
                now = [float(part.detach()) for part in parts]
                mean = [0.98 * a + 0.02 * b for a, b in zip(mean or now, now, strict=True)]
                if (step + 1) % 50 == 0:
                    point = dict(zip(("imitation", "value", "regret"), mean, strict=True))
                    line = {"step": step + 1, **point, "seconds": time.monotonic() - started}
                    curve.write(json.dumps(line) + "\n")
                    curve.flush()
                if (step + 1) % 200 == 0:
                    report(f"step {step + 1}/{settings.steps}: {point}")
                    if step + 1 >= settings.alone:
                        save(network, student, {"settings": json.dumps(asdict(settings))})
    finally:
        teacher.terminate()
        teacher.join()
    save(network, student, {"settings": json.dumps(asdict(settings))})


def _teach(queue: Any, settings: Settings, student: Path) -> None:
    torch.set_num_threads(1)
    stream = lessons(
        settings.seed,
        settings.tokens,
        settings.most_layers,
        settings.most_types,
        lambda: student if student.exists() else None,
    )
    for lesson in stream:
        queue.put(lesson)
