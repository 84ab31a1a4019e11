"""Access control: users, tenants, limits, and the audit log."""
