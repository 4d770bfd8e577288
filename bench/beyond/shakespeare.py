"""A mixture of experts trained on tiny-shakespeare, and what its layers chose on other text.

python -m bench.beyond.shakespeare WORK [--seconds 200]    again, it goes on
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps import MoE, aux_loss
from workers.moe.gates_topk import TopK
from workers.offload.choice.trace import record

LAYERS, EXPERTS, K, WIDTH, HIDDEN, WINDOW = 12, 32, 2, 64, 64, 128
TEXT = Path(__file__).resolve().parents[2] / "../shared/data/text-tinyshakespeare/input.txt"
TOKENS = 2048


class Block(nn.Module):
    """Attention and a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, EXPERTS, HIDDEN, K)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.before(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        out: Tensor = x + self.moe(self.between(x).view(-1, WIDTH)).view(x.shape)
        return out


class Language(nn.Module):
    """Characters to the logits of the next one."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.of_character = nn.Embedding(characters, WIDTH)
        self.of_place = nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, x: Tensor) -> Tensor:
        y = self.of_character(x) + self.of_place.weight[: x.shape[1]]
        for block in self.blocks:
            y = block(y)
        out: Tensor = self.head(y)
        return out


def windows(data: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets [count, WINDOW]."""
    begins = torch.randint(0, len(data) - WINDOW - 1, (count,), generator=generator).tolist()
    made = torch.stack([data[i : i + WINDOW + 1] for i in begins])
    return made[:, :-1], made[:, 1:]


def train(work: Path, seconds: float) -> None:
    """Go on for so long; the state and the trace of the held-out text are files of `work`."""
    text = TEXT.read_text()
    number = {one: i for i, one in enumerate(sorted(set(text)))}
    data = torch.tensor([number[one] for one in text])
    cut = len(data) * 9 // 10
    torch.manual_seed(0)
    torch.set_num_threads(1)  # products are small, and the machine has others
    model = Language(len(number))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step, state = 0, work / "shakespeare.pt"
    if state.exists():
        kept = torch.load(state)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        inputs, targets = windows(data[:cut], 8, torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) + aux_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, state
    )
    model.eval()
    with torch.no_grad():
        inputs, targets = windows(data[cut:], 16, torch.Generator().manual_seed(0))
        held_out = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
        print(f"step {step}: held-out loss {held_out:.3f} nats a character", flush=True)
        trace(model, data[cut:], work)


class Told(TopK):
    """A gate that chooses what it is told: bool [calls, tokens, E], a call after the other."""

    told: Tensor
    guesses: Tensor | None = None  # [calls, E], what is told to be likely before
    calls = 0

    def logits(self, x_TD: Tensor) -> Tensor:  # noqa: N803
        """[T, E], ones of what is told."""
        logits = self.told[self.calls % len(self.told)].to(x_TD.dtype)
        self.calls += 1
        return logits

    def guess(self, x_TD: Tensor) -> Tensor:  # noqa: N803
        """What is likely of the next call."""
        assert self.guesses is not None
        return self.guesses[self.calls % len(self.told)][None]


def tell(layer: MoE, told: Tensor, guesses: Tensor | None = None) -> None:
    """Have a layer of K choices route as told, bool [calls, tokens, E]; guesses are [calls, E]."""
    layer.gate = Told(layer.dim, layer.num_experts, layer.k)
    layer.gate.told, layer.gate.guesses = told, guesses


def trace(model: Language, data: Tensor, work: Path) -> None:
    """What each layer chose for each of TOKENS characters, one after the other as in decoding.

    Beside it, in shakespeare.guesses, float32 [LAYERS, TOKENS, E]: what its gate says of the input
    of the layer before it.
    """
    chosen: list[Tensor] = []
    inputs: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    hooks = [
        hook
        for layer in layers
        for hook in (
            layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0])),
            layer.gate.register_forward_hook(lambda _, __, out: chosen.append(out.routing.chosen)),
        )
    ]
    model(data[:TOKENS].view(-1, WINDOW))
    for hook in hooks:
        hook.remove()
    guesses = [layer.gate.guess(x) for layer, x in zip(layers[1:], inputs[:-1], strict=True)]
    torch.save(torch.stack([torch.zeros_like(guesses[0]), *guesses]), work / "shakespeare.guesses")
    shell = [MoE(WIDTH, EXPERTS, HIDDEN, K) for _ in range(LAYERS)]
    for layer, choices in zip(shell, chosen, strict=True):
        tell(layer, F.one_hot(choices.long(), EXPERTS).sum(dim=1, keepdim=True).bool())
    with record(nn.ModuleList(shell), work / "shakespeare.trace"):
        for _ in range(TOKENS):
            for layer in shell:
                layer(torch.zeros(1, WIDTH))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    train(options.work, options.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
