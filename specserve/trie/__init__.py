"""The draft memory: prompts and outputs of earlier requests on all replicas."""
