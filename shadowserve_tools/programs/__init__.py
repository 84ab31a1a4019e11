"""The long-lived programs as commands, a module each, so that neither waits for what the other imports."""
