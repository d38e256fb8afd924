"""Policy optimization (reinforcement fine-tuning): rollouts, rewards, sandbox and vLLM engine."""
