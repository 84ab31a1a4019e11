"""What benchmarks are made of: workloads, loads, engines, disks and rounds that several of them measure with."""
