"""Train a shipped network again: python -m training NAME; without a name, list the recipes.

A pattern in quotation marks, such as 'regression-two-*', trains several, side by side.
"""

import argparse
import sys
from pathlib import Path

from iclutils import zoo
from iclutils.errors import IclError
from iclutils.session import resolve_device

from . import all_names, loop, matching, recipe, sweep


def main() -> int:
    """Read the command line and train; an interrupted training goes on when it is run again."""
    cli = argparse.ArgumentParser(
        "python -m training", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    cli.add_argument("name", nargs="?", help="a recipe, or several: 'regression-two-*'")
    cli.add_argument("--out", type=Path, help="folder (default _build/train/NAME)")
    cli.add_argument("--device", default="cpu", help="cpu (default), cuda or auto")
    cli.add_argument("--jobs", type=int, help="of several, how many at a time (all cores)")
    cli.add_argument("--scheduler", default="", help="address of a Dask scheduler, for several")
    arguments = cli.parse_args()
    try:
        if arguments.name is None:
            print("\n".join(all_names()))
            return 0
        names, device = matching(arguments.name), resolve_device(arguments.device)
        if len(names) > 1:
            plans = [recipe(name, device) for name in names]
            with sweep.on_cluster(arguments.scheduler):
                folders = sweep.sweep(plans, arguments.out or zoo.trained_folder(), arguments.jobs)
            print("\n".join(map(str, folders)))
        else:
            out = arguments.out or zoo.trained_folder() / names[0]
            loop.train(recipe(names[0], device), out)
            print(f"{out} holds the network. To ship it, copy it to iclutils/zoo/{names[0]}.")
    except IclError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
