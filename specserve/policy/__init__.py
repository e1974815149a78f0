"""Which drafts are sent: acceptance, costs and the plan of a step. Imports no ray, vllm or torch."""
