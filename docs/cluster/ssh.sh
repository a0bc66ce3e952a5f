#!/usr/bin/env bash
# Run a recipe on several machines over ssh: bash ssh.sh "node1 node2 node3 node4" RECIPE KEY=VALUE ...
# Every machine has this folder at the same path, with .venv in it. Set SSH, PORT and SETUP where yours differ.
set -euo pipefail
read -ra nodes <<<"$1"
shift
ssh=${SSH:-ssh} port=${PORT:-6379} here=$PWD setup=${SETUP:-". .venv/bin/activate"}
export RAY_AUTH_MODE=token
prepare="cd $(printf %q "$here") && $setup && export RAY_AUTH_MODE=token ${CARRY:-}"
head=${nodes[0]}

stop() {
  for node in "${nodes[@]}"; do $ssh "$node" "$prepare && ray stop --force" || true; done
}
trap stop EXIT

address=$($ssh "$head" "hostname -I | cut -d' ' -f1")
$ssh "$head" "$prepare && ray start --head --node-ip-address=$address --port=$port --include-dashboard=false"
for node in "${nodes[@]:1}"; do $ssh "$node" "$prepare && ray start --address=$address:$port"; done
run=$(printf ' %q' "$@")
$ssh "$head" "$prepare && tilth run$run cluster.backend=ray cluster.address=$address:$port"
