"""What and where: recording of attention, graphs of patches, spectral solvers, regions."""
