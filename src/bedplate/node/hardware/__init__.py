"""The GPUs and what is around them: NVML, the PCI bus, the kernel's log."""
