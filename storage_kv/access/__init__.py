"""Who may do what, and how much of it: users, tenants, limits, and the log that tells of them."""
