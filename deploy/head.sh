#!/usr/bin/env bash
# Starts the first node of a cluster, in the foreground:
#
#   deploy/head.sh ADDRESS [OPTIONS OF ray start]
#
# ADDRESS is the address by which other nodes reach this one. The cluster's token is in
# RAY_AUTH_TOKEN, or in the file that RAY_AUTH_TOKEN_PATH names. Settings: deploy/node.env.

# shellcheck source=deploy/node.sh
. "$(dirname "$0")/node.sh"

[[ $head == "$VLLM_HOST_IP" ]] || fail "$1 is not an address of this machine"
require_free GCS_PORT CLIENT_PORT
exec ray start --head --port "$GCS_PORT" --ray-client-server-port "$CLIENT_PORT" "${options[@]}" "${@:2}"
