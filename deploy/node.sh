# shellcheck shell=bash
# Sourced by head.sh and worker.sh with their arguments. It sets the environment of Ray and vLLM on
# this node, and the options of `ray start` that head and worker share.
#
# NODE_ENV_FILE  file of settings; default: deploy/node.env

set -euo pipefail

fail() {
  echo "$(basename "$0"): $*" >&2
  exit 2
}

[[ $# -gt 0 && $1 != -* ]] || fail "usage: $(basename "$0") HEAD_ADDRESS [OPTIONS OF ray start]"

set -a
# shellcheck source=deploy/node.env
. "${NODE_ENV_FILE:-$(dirname "${BASH_SOURCE[0]}")/node.env}"
export RAY_AUTH_MODE=token

# Finds the head's address, this node's address on the route to it, and the interface of that address.
# Connecting a datagram socket sends no packet; it only makes the system choose the route.
found=$(python - "$1" 2> /dev/null << 'EOF_PYTHON'
import socket, sys
import psutil
head = socket.gethostbyname(sys.argv[1])
route = socket.socket(type=socket.SOCK_DGRAM)
route.connect((head, 1))
own = route.getsockname()[0]
found = psutil.net_if_addrs().items()
print(head, own, *[name for name, addresses in found if own in (a.address for a in addresses)][:1])
EOF_PYTHON
) || fail "$1: no such host, or no way to it; or Python is not specserve's"
read -r head VLLM_HOST_IP interface <<< "$found"
: "${NCCL_SOCKET_IFNAME:=$interface}" "${GLOO_SOCKET_IFNAME:=$interface}"
set +a

if [[ -z ${RAY_AUTH_TOKEN:-} && ! -s ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token} ]]; then
  [[ $head == 127.* && -z ${RAY_AUTH_TOKEN_PATH:-} ]] ||
    fail "no token: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file that holds it;" \
      "the same on all nodes (openssl rand -hex 32)"
  ray get-auth-token --generate > /dev/null
fi

# require_free [NAME...]: ends with a one-line error if a port is in use. It checks the ports of every
# node and those of the settings NAME...
require_free() {
  local said
  said=$(python - "$@" NODE_MANAGER_PORT OBJECT_MANAGER_PORT RUNTIME_ENV_AGENT_PORT AGENT_GRPC_PORT \
    AGENT_HTTP_PORT METRICS_PORT 2>&1 << 'EOF_PYTHON'
import os, sys
from specserve.core.errors import PortError
from specserve.serve.ports import Port, require_free
host = os.environ["VLLM_HOST_IP"]
ports = [Port(host, int(os.environ[name]), name) for name in sys.argv[1:]]
try:
    require_free(ports, wait_s=float(os.environ.get("PORT_WAIT_S", 10)))
except PortError as error:
    sys.exit(str(error))
EOF_PYTHON
  ) || fail "$said"
}

# shellcheck disable=SC2034  # used by the sourcing script
options=(
  --block
  --disable-usage-stats
  --node-ip-address "$VLLM_HOST_IP"
  --node-manager-port "$NODE_MANAGER_PORT"
  --object-manager-port "$OBJECT_MANAGER_PORT"
  --runtime-env-agent-port "$RUNTIME_ENV_AGENT_PORT"
  --dashboard-agent-grpc-port "$AGENT_GRPC_PORT"
  --dashboard-agent-listen-port "$AGENT_HTTP_PORT"
  --metrics-export-port "$METRICS_PORT"
  --min-worker-port "$MIN_WORKER_PORT"
  --max-worker-port "$MAX_WORKER_PORT"
)
