"""SGLang's engine on a CPU: files that run in its environment, with their folder on PYTHONPATH."""
