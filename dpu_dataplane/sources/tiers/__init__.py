"""Local tiers: a pool of memory and devices of this machine as a source, alone or above another one."""
