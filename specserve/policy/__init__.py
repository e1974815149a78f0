"""What is drafted and sent: acceptance, costs, a step's plan. Imports no ray, vllm or torch."""
