#!/usr/bin/env bash
# Starts one more node of a cluster, in the foreground:
#
#   deploy/worker.sh HEAD_ADDRESS [OPTIONS OF ray start]
#
# The token is the head's, in RAY_AUTH_TOKEN or in the file that RAY_AUTH_TOKEN_PATH names. Settings:
# deploy/node.env. It ends when the head ends or gives this node up: let systemd restart it, with
# TimeoutStopSec=150, because at SIGTERM running requests have RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
# seconds (130).

# shellcheck source=deploy/node.sh
. "$(dirname "$0")/node.sh"

# Checked first, because Ray's own attempts take minutes and end in a stack trace.
status=0
said=$(timeout "$HEAD_WAIT_S" ray health-check --address "$head:$GCS_PORT" 2>&1) || status=$?
case "$status $said" in
  "0 "*) ;;
  124*) fail "no head answered at $head:$GCS_PORT within $HEAD_WAIT_S s" ;;
  *InvalidAuthToken*) fail "the head at $head:$GCS_PORT refuses this node's token" ;;
  *) fail "the head at $head:$GCS_PORT refuses this node: ${said##*$'\n'}" ;;
esac
require_free
# Ray waits 30 s by default, which would cut off a longer http.drain_timeout_s.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="${RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S:-130}"
exec ray start --address "$head:$GCS_PORT" "${options[@]}" "${@:2}"
