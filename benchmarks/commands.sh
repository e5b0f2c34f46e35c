#!/bin/bash
# Time and memory of `make book` and `make test`, from installed, in two checkouts by turns:
#     git worktree add ../old before-halving; make -C ../old setup; make setup
#     bash benchmarks/commands.sh ../old . 3
# `book` or `test` as a fourth word: that one alone. A line each: seconds; processor seconds and peak
# memory of the processes that the command waits for (kernels that before-halving forks are not among
# them, so compare seconds, and sample its memory); exit status.
set -eu
old=$(realpath "$1") new=$(realpath "$2") turns=${3:-3}
for command in ${4:-book test}; do
  for turn in $(seq "$turns"); do
    for folder in "$old" "$new"; do
      rm -rf "$folder/_build"
      printf '%s %s %s: ' "$command" "$turn" "$(git -C "$folder" log -1 --format=%h)"
      /usr/bin/time -q -f '%e s, %U + %S processor s, %M kB' -o "$folder/.venv/time" \
        timeout 1800 make -C "$folder" "$command" > "$folder/.venv/$command.log" 2>&1 \
        && status=0 || status=$?
      echo "$(tail -1 "$folder/.venv/time"), status $status"
    done
  done
done
