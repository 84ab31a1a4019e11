"""The engine's slack: how long it computes, and what may move meanwhile (Tutti, design 3)."""
