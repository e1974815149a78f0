#!/usr/bin/env bash
# Starts the first node of a cluster and serves a file on it, in the foreground:
#
#   deploy/serve.sh ADDRESS FILE [OPTIONS OF ray start]
#
# ADDRESS and the token are those of head.sh, and RAY_AUTH_MODE is token. Node and application end
# together, because a restarted one does not find the other. SIGINT or SIGTERM ends first the
# application, then the node.

set -euo pipefail
folder=$(dirname "$0")
# shellcheck source=deploy/node.env
. "${NODE_ENV_FILE:-$folder/node.env}"
address=$1:$GCS_PORT

"$folder/head.sh" "$1" "${@:3}" &
head=$!
trap 'kill $head || true; wait $head || true; exit 1' INT TERM
until ray health-check --address "$address"; do
  kill -0 $head  # the head still runs
  sleep 1
done

# A shell starts background processes with SIGINT ignored.
env --default-signal=INT serve run --address "$address" "$2" &
application=$!
trap 'kill -INT $application || true' INT TERM
status=0
wait $application || status=$?  # a signal ends the wait too
while kill -0 $application 2> /dev/null; do
  status=0
  wait $application || status=$?
done

# The draft memory's store runs on after the application. This writes its last snapshot, whichever
# node it is on. Without such a store or a snapshot_url, the command only prints a line.
specserve trie snapshot --address "$address" || true
kill $head || true
wait $head || true
exit $status
