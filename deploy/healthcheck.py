"""Health check of the head's container: fails if Ray does not answer or Serve gave up a start.

RAY_AUTH_TOKEN is the cluster's token. RAY_DASHBOARD_ADDRESS is the URL of Ray's dashboard, as for
`serve status`.
"""

import json
import os
import sys
from urllib.request import Request, urlopen

ANSWER_S = 8
"""Time limit for the answer, in seconds; the compose file gives the whole check 10."""

url = os.environ.get("RAY_DASHBOARD_ADDRESS", "http://127.0.0.1:8265")
request = Request(
    f"{url}/api/serve/applications/",
    headers={"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"},
)
with urlopen(request, timeout=ANSWER_S) as answer:
    applications = json.load(answer)["applications"]
for name, application in applications.items():
    if application["status"] == "DEPLOY_FAILED":
        sys.exit(f"{name}: DEPLOY_FAILED: {application['message']}")
