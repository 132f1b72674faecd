"""A parameter server without a run: logistic regression over hashed words, by push and pull alone.

python examples/store.py                     tables in this process
python examples/store.py --servers 2         on two servers that end with the script
python examples/store.py --at HOST:PORT      on a `manyhands server --keep`; start several of these
"""

import argparse

import torch

import manyhands as mh

WORDS, BATCH = 1 << 40, 256  # a row for a word that was seen, none for the others


def sentences(n: int, dice: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight words each, a few of them everywhere; good or bad, by the sum of what words mean."""
    rank = (torch.rand(n, 8, generator=dice) ** -2).long().clamp(max=100_000)
    meaning = torch.sin(rank.double() * 12.9898) * 2
    words = rank * 0x9E3779B97F4A7C1 % WORDS  # ids as they come: no range, no order
    return words, (meaning.sum(1) > 0).float()


def train(store: mh.Store, steps: int, seed: int = 0) -> float:
    """The accuracy over the last tenth of the steps, each batch judged before it is learnt."""
    store.create("words", dim=1, optimizer="adagrad", lr=0.3, init="zeros")
    dice, right = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        words, good = sentences(BATCH, dice)
        logits = store.pull("words", words).sum((1, 2))
        right.append(((logits > 0) == (good > 0)).float().mean().item())
        slope = (torch.sigmoid(logits) - good) / BATCH
        store.push("words", words, slope[:, None, None].expand(-1, 8, 1))
    store.wait()
    last = right[-max(1, steps // 10) :]
    return sum(last) / len(last)


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--servers", type=int, default=0)
    given.add_argument("--at", metavar="HOST:PORT")
    given.add_argument("--steps", type=int, default=400)
    given.add_argument("--seed", type=int, default=0, help="another for each client of a server")
    args = given.parse_args()
    with mh.Store(args.at, servers=args.servers) as store:
        accuracy = train(store, args.steps, args.seed)
        print(f"{store}: {accuracy:.1%} right, {store.tables()['words'].rows:,} words")


if __name__ == "__main__":
    main()
