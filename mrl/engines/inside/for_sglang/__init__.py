"""Modules that run inside SGLang's environment, apart from those that vLLM's workers find."""
