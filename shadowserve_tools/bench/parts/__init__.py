"""Parts of benchmarks: workloads, loads, engines, disks and rounds that several benchmarks use."""
