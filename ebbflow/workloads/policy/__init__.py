"""Policy optimization: rollouts, rewards, sandbox and the vLLM engine."""
