"""What runs inside SGLang's environment, apart from what vLLM's workers find."""
