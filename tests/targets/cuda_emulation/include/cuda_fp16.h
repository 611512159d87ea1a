// In place of CUDA's: emulation.h, which is included before everything, has what is needed.
