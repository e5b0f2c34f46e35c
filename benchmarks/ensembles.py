"""Several small in-context regressors trained as one batched program, against one after the other.

Both ways take the same training steps (data, loss, gradients, clipping, both optimisers) from
the same weights, in one process; the losses of all members must agree to 1e-4 after them, or the
benchmark stops. The ways take turns, and the median of the turns counts.

    python benchmarks/ensembles.py --threads 1
"""

import statistics

from common import in_turns, options

from iclutils.models.regressors import Shape
from iclutils.tasks.regression import Task
from training.loop import take_step
from training.regression import RegressionRecipe

MEMBERS = 8
# (d, layers, width, contexts in a batch)
SIZES = [(2, 1, 16, 16), (2, 2, 32, 16), (4, 2, 32, 64), (4, 4, 64, 64), (8, 8, 64, 64)]
TOLERANCE = 1e-4


def recipe(size, seeds):
    """A recipe of that size with a member for each seed."""
    dim, layers, width, batch = size
    shape = Shape(dim, 2 * dim + 1, "one", layers, width, 2)
    members = [(seed, Task(dim)) for seed in seeds]
    settings = {"steps": 1000, "warmup": 50, "batch": batch, "log_every": 1000}
    return RegressionRecipe.of("bench", "cpu", shape=shape, members=members, **settings)


class Run:
    """One training that can be taken further; ``losses`` are summed over its members."""

    def __init__(self, plan):
        self.plan, self.network = plan, plan.network().train()
        self.optimizers = plan.optimizers(self.network)
        self.done = 0

    def go(self, steps):
        """Take that many steps; the loss of the last."""
        for _ in range(steps):
            self.done += 1
            loss = take_step(self.network, self.optimizers, self.plan, self.done)
        return loss


def compare(size, turns, steps):
    """Print one line: seconds per step of all members, both ways, and the ratio."""
    together = Run(recipe(size, list(range(MEMBERS))))
    alone = [Run(recipe(size, [seed])) for seed in range(MEMBERS)]
    ways = {
        "together": lambda: together.go(steps),
        "one by one": lambda: sum(run.go(steps) for run in alone),
    }
    # The warm-up is the check too: later, rounding has had time to grow.
    joint, apart = (way() for way in ways.values())
    if abs(joint - apart) > TOLERANCE * abs(apart):
        raise SystemExit(f"{size}: the losses differ, {joint} and {apart}")
    seconds = in_turns(ways, turns)
    fast, slow = (1000 * statistics.median(times) / steps for times in seconds.values())
    dim, layers, width, batch = size
    print(
        f"d {dim}, {layers} layers, width {width:3}, batch {batch:3}: together {fast:7.1f} ms, "
        f"one by one {slow:7.1f} ms, ratio {slow / fast:.2f}"
    )


def main():
    """Run all sizes."""
    given = options(__doc__, turns=(5, ""), steps=(5, "in a turn"))
    for size in SIZES:
        compare(size, given.turns, given.steps)


if __name__ == "__main__":
    main()
