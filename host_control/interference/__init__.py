"""How long the engine computes and loads, and by how much transfers slow it down (Tutti, design 3)."""
